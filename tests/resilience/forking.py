"""The process that forks those which die, as the tests see it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Zygote"]


class Zygote:
    """`zygote(scene="work", die="after topics/take", ...)`: run that in its own process, and return how it ended."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.resilience.zygote"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.out, self.orders = self.process.stdout, self.process.stdin
        assert self.out.readline() == "ready\n"
        self.kills = 0

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()
        answer: dict[str, Any] = json.loads(self.out.readline())
        return answer

    def start(self, **order: Any) -> int:
        """A process that lives until `kill`; its number."""
        return int(self._answer({"do": "start", **order})["pid"])

    def preload(self, module: str) -> None:
        """Import a module before the processes that need it are forked."""
        self._answer({"do": "import", "module": module})

    def stop(self, after: float, **order: Any) -> int:
        """A process that stands still `after` seconds from its beginning, wherever it is; its number."""
        return int(self._answer({"do": "stop", "stop_after": after, **order})["pid"])

    def go_on(self, pid: int, number: int = signal.SIGCONT) -> dict[str, Any]:
        """Continue a process that stands still, or kill it with SIGKILL. Return how it ended."""
        return self._ended(self._answer({"do": "continue", "pid": pid, "signal": int(number)}))

    def kill(self, pid: int) -> None:
        """Dead when this returns."""
        assert self._answer({"do": "kill", "pid": pid}) == {"signal": 9}, "it had ended before"
        self.kills += 1

    def __call__(self, **order: Any) -> dict[str, Any]:
        return self._ended(self._answer(order))

    def _ended(self, ended: dict[str, Any]) -> dict[str, Any]:
        assert "error" not in (ended["said"] or ()), ended["said"]["traceback"]
        self.kills += ended["signal"] == 9
        return ended

    def close(self) -> None:
        self.orders.close()
        self.process.wait(60)
        self.out.close()
