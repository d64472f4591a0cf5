"""Build the site into `build/site/html`, which any web server serves: `python -m http.server -d build/site/html`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from subprocess import CalledProcessError

from tools.site import DeadLink, build

if __name__ == "__main__":
    if find_spec("zensical") is None:
        sys.exit("zensical is not installed: run `.venv/bin/uv sync --all-packages --all-extras --group site`")
    try:
        print(build())
    except DeadLink as error:
        sys.exit(f"dead link in {error}")
    except CalledProcessError as error:
        sys.exit(error.returncode)
