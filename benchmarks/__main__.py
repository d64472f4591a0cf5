"""`python -m benchmarks all`, or one part at a time."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import sys
import time

from benchmarks import environments, machine, results
from benchmarks.environments import CACHE
from benchmarks.plan import APART, PARTS, Plan
from benchmarks.report import figures


def main() -> None:
    words = _arguments()
    if words.part in ("all", "report") and importlib.util.find_spec("matplotlib") is None:
        sys.exit("the report draws with matplotlib, which is not installed: pip install matplotlib")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    plan = Plan(words.repetitions or 3, 0.1) if words.quick else Plan(words.repetitions or 5)
    if words.part == "peers":
        for name in [*environments.PYTHON, *environments.NODE]:
            print(f"making {name}", flush=True)
            environments.make(name)
    elif words.part != "report":
        for part in PARTS if words.part == "all" else [words.part]:
            _measure(part, plan)
    if words.part in ("all", "report"):
        importlib.import_module("benchmarks.report").write()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        epilog=f"Environments and results lie in IDEMGATE_BENCHMARKS, a folder; now: {CACHE}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    words = {
        "all": f"every part but {', '.join(APART)}, then the report",
        "peers": "make the environments of the peers (once)",
        "report": "write docs/performance.md from what was measured",
    }
    told = "\n".join(f"{part:13} {what}" for part, what in (words | PARTS | APART).items())
    parser.add_argument("part", choices=[*words, *PARTS, *APART], help=told)
    parser.add_argument("--quick", action="store_true", help="a tenth of the operations, three repetitions")
    parser.add_argument("--repetitions", type=_repetitions, help="1 or more; default: 5")
    return parser.parse_args()


def _repetitions(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _measure(part: str, plan: Plan) -> None:
    began = time.monotonic()
    print(f"{part}: {(PARTS | APART)[part]} ", end="", flush=True)
    found = importlib.import_module(f"benchmarks.{part}").run(plan)
    results.save(part, {"facts": machine.facts(plan.repetitions), "share": plan.share, "rows": found})
    print(f"\n{figures.shown(found)}")
    print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
