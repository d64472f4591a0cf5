"""Look for names that no script defines, and for names that nobody uses, with luacheck.

It reads each script with its includes. A function of a library is unused if none of its scripts uses it. Without
luacheck this says so and succeeds, unless IDEMGATE_NEED names luacheck (`.ci/run` does).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from idemgate import lua

__all__ = ["findings", "main"]

GLOBALS = ["KEYS", "ARGV", "redis", "cmsgpack", "struct"]
IGNORED = ["31.", "4.."]
"""An assigned value that is not used, and shadowed names: functions of several libraries have the same parameters."""
_REPORT = re.compile(r"^(.+?):(\d+):\d+: (.+)$", re.MULTILINE)


def findings(names: list[str]) -> list[str]:
    """Return what luacheck reports of these scripts, each with the file and line that it is about."""
    lines, scripts, reports = dict[str, list[str]](), Counter[str](), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            expanded = lua.expand(name, read=_with_places).splitlines()
            lines[name] = [line.rpartition(" --@ ")[2] for line in expanded]
            scripts.update(lines[name])
            Path(folder, name.replace("/", ".") + ".lua").write_text("\n".join(expanded))
        words = ["--std", "lua51", "--globals", *GLOBALS, "--ignore", *IGNORED, "--no-max-line-length", "--no-color"]
        words += ["--no-unused-secondaries"]
        told = subprocess.run(["luacheck", *words, "--", folder], capture_output=True, text=True, check=False).stdout
        for path, number, what in {*_REPORT.findall(told)}:
            reports[lines[Path(path.strip()).stem.replace(".", "/")][int(number) - 1], what] += 1
    return sorted(f"{place}: {what}" for (place, what), n in reports.items() if n >= scripts[place])


def _with_places(name: str) -> str:
    lines = enumerate(lua.source(name).splitlines(), 1)
    return "\n".join(line if "@include" in line else f"{line} --@ {name}:{at}" for at, line in lines) + "\n"


def main() -> int:
    if not shutil.which("luacheck"):
        needed = "luacheck" in os.environ.get("IDEMGATE_NEED", "").split(",")
        print("luacheck is not here, so the scripts are not checked: apt-get install -y lua-check", file=sys.stderr)
        return int(needed)
    found = findings([*lua.names(), "store/touch"])
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
