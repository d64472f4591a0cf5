"""A small warm process that forks the processes that die: one thread, everything imported, no connection made.

    python -m tests.resilience.zygote

reads orders from its standard input, one JSON a line, and answers each with how its child ended: {"signal": 9,
"said": null}. With `"do": "start"` it does not wait, and answers {"pid": 4711}; `"do": "kill"` ends such a child.
`"do": "stop"` answers when a child stands still, and `"do": "continue"` how it ended. `"do": "import"` imports a module
once, so that no child has to. A scene outside of this folder is "package.module:function".
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from typing import Any

from tests.resilience import points
from tests.resilience.chores import chores
from tests.resilience.load import LOADS
from tests.resilience.payments import pay
from tests.resilience.scenes import SCENES


def fork(order: dict[str, Any]) -> tuple[int, int]:
    """A child, and the pipe that it writes to."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        os.dup2(2, 1)  # the standard output is for answers
        os._exit(lived(order, theirs))
    os.close(theirs)
    return pid, ours


def forked(order: dict[str, Any]) -> dict[str, Any]:
    """What became of one child: the signal that ended it, or what it said."""
    pid, ours = fork(order)
    if "kill_after" in order:
        os.read(ours, 1)  # it has begun
        if not select.select([ours], [], [], order["kill_after"])[0]:
            os.kill(pid, signal.SIGKILL)
    return ended(pid, ours)


def ended(pid: int, ours: int) -> dict[str, Any]:
    said = b""
    while piece := os.read(ours, 65536):
        said += piece
    os.close(ours)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"signal": -status if status < 0 else None, "said": json.loads(said) if status >= 0 else None}


def started(order: dict[str, Any]) -> dict[str, Any]:
    """A child that lives on, and says what went wrong, if anything, on the standard error."""
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)
        os._exit(lived(order, 2))
    return {"pid": pid}


def stopped(order: dict[str, Any]) -> dict[str, Any]:
    """A child that stands still after a while, unless it has ended."""
    pid, ours = fork(order)
    os.read(ours, 1)  # it has begun
    time.sleep(order["stop_after"])
    os.kill(pid, signal.SIGSTOP)
    pipes[pid] = ours
    return {"pid": pid}


def continued(order: dict[str, Any]) -> dict[str, Any]:
    os.kill(order["pid"], order["signal"])
    return ended(order["pid"], pipes.pop(order["pid"]))


def killed(order: dict[str, Any]) -> dict[str, Any]:
    """Dead for certain when this returns; another signal than 9 if it had ended before."""
    os.kill(order["pid"], signal.SIGKILL)
    return {"signal": -os.waitstatus_to_exitcode(os.waitpid(order["pid"], 0)[1])}


def lived(order: dict[str, Any], out: int) -> int:
    try:
        if order["scene"] not in LOADS:  # what counts its calls keeps them all; loads are to stay small
            points.install(order.get("die", ""))
        scene = find_scene(order["scene"])(order)
        if "kill_after" in order or "stop_after" in order:
            os.write(out, b"\n")
        said: object = scene()
    except BaseException as error:
        said = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    os.write(out, json.dumps(said).encode())
    return 0


def find_scene(name: str) -> Any:
    module, _, function = name.partition(":")
    if function:
        return getattr(importlib.import_module(module), function)
    return (SCENES | LOADS | {"chores": chores, "pay": pay})[name]


def preload(order: dict[str, Any]) -> dict[str, Any]:
    importlib.import_module(order["module"])
    return {}


ORDERS = {"run": forked, "start": started, "kill": killed, "stop": stopped, "continue": continued, "import": preload}
pipes: dict[int, int] = {}
"""Of children that stand still."""


def main() -> None:
    logging.disable()  # a crash now and then is the normal case here
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a child that has no handler for it yet ignores it
    faulthandler.enable()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(ORDERS[order.get("do", "run")](order)), flush=True)


if __name__ == "__main__":
    main()
