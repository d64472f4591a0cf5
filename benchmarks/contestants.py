"""Contestants as processes: started, on a core of theirs unless that is not wanted, asked, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from benchmarks.environments import CACHE, command, made
from benchmarks.machine import CLIENT, ROOT, pinned

__all__ = ["Ask", "begin", "contestants", "end"]

LOG = CACHE / "contestants.log"
PATIENCE = 60
"""Seconds that one step may take."""
Ask = subprocess.Popen[str]
"""A contestant that waits for a request."""


@contextmanager
def contestants(names: Sequence[str], url: str, core: int | None = CLIENT) -> Iterator[dict[str, Ask]]:
    """Those of `names` that can run here, started; the others are said once. `core`: None for any."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        there = {name: stack.enter_context(_contestant(name, url, core)) for name in names if made(name)}
        if absent := [name for name in names if name not in there]:
            print(f"left out, without an environment (python -m benchmarks peers): {', '.join(absent)}")
        yield there


@contextmanager
def _contestant(name: str, url: str, core: int | None) -> Iterator[Ask]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "POWERTOOLS_TRACE_DISABLED": "true"}
    words = pinned(core, command(name, url))
    pipe, log = subprocess.PIPE, LOG.open("a")
    with log, subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True, env=env, cwd=CACHE) as process:
        try:
            yield process
        finally:
            process.kill()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of a request that was not sent
                process.stdin.close()


def begin(contestant: Ask, step: str, **words: object) -> None:
    """Sends a request; `end` waits for its answer."""
    assert contestant.stdin is not None
    with suppress(BrokenPipeError):  # it ended before: `end` says so
        contestant.stdin.write(json.dumps({"step": step, **words}) + "\n")
        contestant.stdin.flush()


def end(contestant: Ask) -> dict[str, Any]:
    """The answer to what was asked with `begin`; one that does not answer in time is ended."""
    assert contestant.stdout is not None
    if not select.select([contestant.stdout], [], [], PATIENCE)[0]:
        contestant.kill()
        return {"error": f"no answer within {PATIENCE} s"}
    line = contestant.stdout.readline()
    return json.loads(line) if line else {"error": f"it ended before the command; see {LOG}"}
