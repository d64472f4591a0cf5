"""The line of code at which a thread or a task is now."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

__all__ = ["find_location"]

MAX_FRAMES = 200
_STANDARD = str(Path(os.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep


def find_location(runs_in: object, threads: Mapping[int, FrameType]) -> str:
    """Return the file, the line and the function of a task, or of the thread with this id. Empty if it has ended.

    It is the innermost frame of the user's program. Without one it is the innermost of an installed package, and
    without one of these that of the standard library. A plain function that a task runs in a thread is a part of it.

    Args:
        runs_in: A task, or the id of a thread.
        threads: The result of `sys._current_frames`.
    """
    if isinstance(runs_in, int):
        frames = list(_chain(runs_in, threads))
    else:
        frames = _frames_of_task(runs_in, threads)
        frames = [*_frames_of_helper(frames, threads), *frames]
    if not frames:
        return ""
    frame = min(frames, key=lambda frame: _rank(frame.f_code.co_filename))  # the first of those with this rank
    return f"{_short_name(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def _chain(thread: int, threads: Mapping[int, FrameType]) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    frame = threads.get(thread)
    for _ in range(MAX_FRAMES):
        if not isinstance(frame, FrameType):  # the last one, or what a running thread has overwritten (Python 3.11)
            return
        yield frame
        frame = frame.f_back


def _frames_of_task(task: object, threads: Mapping[int, FrameType]) -> list[FrameType]:
    """Return the frames of a task, the innermost first."""
    frames, coroutine = list[FrameType](), getattr(task, "get_coro", lambda: None)()
    while coroutine is not None and len(frames) < MAX_FRAMES:
        frame, coroutine = _step(coroutine)
        if frame is None:
            break
        frames.append(frame)
    if frames:  # a task that runs at this moment suspends nothing: its inner frames are those of a thread
        for thread in threads:
            chain = list(_chain(thread, threads))
            if frames[0] in chain:
                return chain[: chain.index(frames[0]) + 1]
    return frames[::-1]


def _frames_of_helper(frames: Sequence[FrameType], threads: Mapping[int, FrameType]) -> list[FrameType]:
    """Return the frames of the thread that these frames of a task wait for, if it runs a plain function for them.

    `guard.aio` and anyio, by which FastStream calls plain handlers, keep the thread in a variable. What the user's own
    coroutines and the standard library keep may be any thread. `isinstance` would ask a lazy object for its class.
    """
    for frame in frames:
        rank = _rank(frame.f_code.co_filename)
        if rank == 0:
            break
        for value in frame.f_locals.values() if rank != 2 else ():
            if issubclass(type(value), Thread) and (ident := value.ident or 0) in threads:
                return list(_chain(ident, threads))
    return []


def _step(coroutine: Any) -> tuple[FrameType | None, Any]:
    """Return the frame of a coroutine or generator, and what it awaits."""
    for prefix, awaited in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        frame = getattr(coroutine, f"{prefix}_frame", None)
        if frame is not None:
            return frame, getattr(coroutine, awaited, None)
    return None, None


@lru_cache(4096)
def _rank(file: str) -> int:
    if file.startswith(_OURS):
        return 3
    if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
        return 1
    return 2 if file.startswith((_STANDARD, "<")) else 0


@lru_cache(4096)
def _short_name(file: str) -> str:
    """Return the path below the folder from which Python imported it, or its last two parts."""
    path = Path(file)
    roots = [root for root in map(Path, sys.path) if root.is_absolute() and path.is_relative_to(root)]
    return str(path.relative_to(max(roots, key=lambda root: len(root.parts)))) if roots else "/".join(path.parts[-2:])
