"""`python -m idemgate`: the same as the command `idemgate`."""

from __future__ import annotations

import sys

from idemgate.cli import main

if __name__ == "__main__":
    sys.exit(main())
