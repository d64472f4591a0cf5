"""An exception at every point of a call at which a signal handler can raise one.

CPython runs signal handlers when a function begins, after calls and at backward jumps. `Interrupter` counts these
points in the code of this package, and raises at one of them.
"""

from __future__ import annotations

import dis
import sys
import tracemalloc  # noqa: F401 - else pytest imports it when a destructor is interrupted
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import idemgate

__all__ = ["Interrupter", "Stopped", "TimeUp"]

PACKAGE = str(Path(idemgate.__file__).parent)


class TimeUp(Exception):
    """As the soft limit of Celery."""


class Stopped(BaseException):
    """As Ctrl-C."""


@lru_cache(4096)
def points_of(code: CodeType) -> frozenset[int]:
    """Return the offsets of instructions before which a signal handler may have run.

    A return is left out: the handler runs before it, and what it raises is caught by the `try` around the call.
    """
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and not instruction.opname.startswith("RETURN"):
            found.add(instruction.offset)
        if instruction.opname not in ("CACHE", "NOP", "EXTENDED_ARG"):
            before = instruction.opname
    return frozenset(found)


class Interrupter:
    """Run a function and raise `kind` at its `stop`-th point. `reached` is how many points there were, at most `stop`.

    `where` is the place, for the failure of a test. Only the code of this package in this thread counts, or that of its
    `parts`. The absolute path of another package or module is a part, too.
    """

    def __init__(self, stop: int, kind: type[BaseException], *parts: str) -> None:
        self.stop = stop
        self.kind = kind
        self._counted = tuple(str(Path(PACKAGE, part)) for part in parts) or (PACKAGE,)
        self.reached = 0
        self.where = ""

    def run(self, func: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return func()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._counted) or self.where:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._trace_opcode

    def _trace_opcode(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and not self.where and frame.f_lasti in points_of(frame.f_code):
            self.reached += 1
            if self.reached == self.stop:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"
                raise self.kind(self.where)
        return self._trace_opcode
