"""Pickle of a gate: its arguments travel, and each process opens its own connections."""

from __future__ import annotations

import threading
from pathlib import Path
from pickle import PicklingError
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

__all__ = ["portable_options", "rebuild_gate"]

_rebuilt: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
_lock = threading.Lock()


def portable_options(gate: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments with which another process builds a gate of the same store.

    Raises:
        PicklingError: the gate has something that exists in this process only.
    """
    url = options["url"]
    if url is None and gate.context.source is not None:
        raise _refusal(gate, "it was made from a client", "Make it from a URL or IDEMGATE_URL")
    if gate.context.clock is not None:
        raise _refusal(gate, "it has a clock of this process", "Leave out clock=")
    if url is not None and url.startswith("embedded:"):
        from idemgate.store.embedded.server import directory_of

        if (directory := directory_of(url)) is None:
            raise _refusal(gate, "its embedded server is temporary and of this process", "Name a directory in the URL")
        url = f"embedded://{quote(str(Path(directory).resolve()))}"
    return options | {"url": url}


def _refusal(gate: Any, reason: str, fix: str) -> PicklingError:
    return PicklingError(
        f"cannot pickle {gate}: {reason}. {fix}, or create the gate in a module that each process imports"
    )


def rebuild_gate(cls: type[Any], options: dict[str, Any]) -> Any:
    """Return the gate of these arguments. All that this process unpickles with the same arguments are one gate."""
    key = (cls, *options.items())
    with _lock:
        gate = _rebuilt.get(key)
        if gate is None:
            gate = _rebuilt[key] = cls(**options)
        return gate
