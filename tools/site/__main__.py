"""Build the site into `build/site/html`, which any web server serves: `python -m http.server -d build/site/html`."""

from __future__ import annotations

import sys
from subprocess import CalledProcessError

from tools.site import DeadLink, build

if __name__ == "__main__":
    try:
        print(build())
    except DeadLink as error:
        sys.exit(f"dead link in {error}")
    except CalledProcessError as error:
        sys.exit(error.returncode)
