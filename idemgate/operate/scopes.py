"""The verb that moves the records of a scope to another one, after its function was renamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from idemgate.core.calls import Batch
from idemgate.core.keys import check_scope, patterns, record_prefix
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.guard.claim_calls import Claims, register_retention
from idemgate.operate.verb import Facts, Given, Parameter, Verb
from idemgate.store.nodes import Server, servers

__all__ = ["SCOPE_VERBS"]


def _look_move(gate: Gate, given: Given) -> Facts:
    """Return how many records would move, and refuse while one has a lease: its callers are not stopped."""
    _check(given)
    states = Counter[str]()
    claims = Claims(gate.namespace, gate.context.clock)
    with servers(gate.context.endpoint) as found:
        for _, batch in _scan(gate, found, given["scope"]):
            requests = [claims.inspect((key,)) for key in batch]
            states.update(one.state for one in gate.context.link.run_all(Batch(requests, list)))
    if states["in_progress"]:
        raise InvalidArgument(
            "scope", given["scope"], f"has keys in progress: {states['in_progress']}",
            "Stop all callers of the scope, and wait until their leases have ended",
        )  # fmt: skip
    return {"scope": given["scope"], "to": given["to"], "records": states.total()}


def move_scope(gate: Gate, given: Given) -> Facts:
    """Move the records of a scope, each with its time to live. It may be repeated.

    If the other scope has a record of a key already, both stay: they are `kept`.
    """
    moved = kept = 0
    before, after = (record_prefix(gate.namespace, given[name]) for name in ("scope", "to"))
    _register(gate, given)
    with servers(gate.context.endpoint) as found:
        for server, batch in _scan(gate, found, given["scope"]):
            for key in batch:
                is_moved = _move(gate, server, key, after + key.removeprefix(before))
                moved += is_moved is True
                kept += is_moved is False
    return {"scope": given["scope"], "to": given["to"], "moved": moved, "kept": kept}


def _check(given: Given) -> None:
    check_scope(given["scope"])
    check_scope(given["to"])
    if given["scope"] == given["to"]:
        raise InvalidArgument("to", given["to"], "the same scope", "Name another one")


def _register(gate: Gate, given: Given) -> None:
    """Let the store know the other scope, with the retention of the one that moves. `key` commands look there."""
    link = gate.context.link
    if retention := link.run(register_retention(gate.context, given["scope"], 0)):
        link.run(register_retention(gate.context, given["to"], retention))


def _scan(gate: Gate, found: Sequence[Server], scope: str) -> Iterator[tuple[Server, list[bytes]]]:
    """Yield batches of the keys of a scope's records. SCAN may return a key twice."""
    prefix = record_prefix(gate.namespace, scope)  # no pattern: a scope may hold characters of one
    for server in found:
        for batch in server.scan(patterns(gate.namespace)["records"].encode()):
            yield server, [key for key in batch if key.startswith(prefix)]


def _move(gate: Gate, server: Server, key: bytes, to: bytes) -> bool | None:
    """Move one record. Return False if there is another one, and None if it has expired.

    It is written before it is deleted. If this ends in between, the next try finds the copy, and deletes it here.
    """
    stored, left = server.pipeline([("GET", key), ("PTTL", key)])
    if stored is None or left == -2:
        return None
    if left < 0:  # damaged: each record expires
        return False
    link = gate.context.link
    if link.command("SET", to, stored, "NX", "PX", left) is None and link.command("GET", to) != stored:
        return False
    server.command("UNLINK", key)
    return True


SCOPE_VERBS = (
    Verb(
        "scope", "move", "move the keys of a scope to another one, after a function without scope= was renamed. Stop "
        "all callers of both before. It SCANs all keys of the server, so the user needs the role auditor, too",
        move_scope,
        (
            Parameter("scope", "the former scope, such as shop.app.charge", required=True),
            Parameter("to", "the scope that has the keys from now on", required=True),
        ), _look_move, loses=True,
    ),
)  # fmt: skip
