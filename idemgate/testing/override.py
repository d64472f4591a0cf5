"""Another store for a gate that a program makes when it is imported."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from idemgate.core.clock import Clock
from idemgate.core.keys import check_name
from idemgate.errors import InvalidArgument
from idemgate.gate import parse_source

if TYPE_CHECKING:
    from idemgate.gate import Gate

__all__ = ["override"]


@contextmanager
def override(
    gate: Gate, store: str | object | None = None, *, namespace: str | None = None, clock: Clock | None = None
) -> Generator[Gate]:
    """Let a gate use another store, namespace and clock while the block runs.

    What the program has made of the gate uses them, too: guarded functions, guards, topics, merged functions, dedup
    sets and subscribers. The gate counts from 0, and does not report (`presence`). At the end its connections to that
    store are closed, and everything is as before. A topic forgets the policy that it read in the other store.

    For `idemgate.once` and `idemgate.merge` pass `idemgate.default_gate`. `idemgate.configure` then changes nothing.

    Args:
        gate: The gate, such as `shop.app.gate`.
        store: As for `Gate`. None: the store of the gate.
        namespace: None: the namespace of the gate.
        clock: None: the clock of the gate, if it has one.

    Returns:
        The gate.

    Raises:
        InvalidArgument: A worker or subscribers of the gate run, or an argument is invalid.
    """
    context = gate.context
    if context.runners.now():
        fix = "Stop the worker and the subscribers before"
        raise InvalidArgument("gate", gate, "a worker or a subscriber of it runs", fix)
    source = context.source if store is None else parse_source(store)
    name = context.namespace if namespace is None else check_name(namespace, "namespace")
    options, url = gate._options(), store if isinstance(store, str) else None
    before = {"store": options["store"], "namespace": options["namespace"]}
    options |= {"store": before["store"] if store is None else url, "namespace": name}
    try:
        with context.override(source, name, context.clock if clock is None else clock):
            yield gate
    finally:
        options |= before
