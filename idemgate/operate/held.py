"""The verb that finds the held keys: those that wait for `key resolve`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from idemgate.core import keys
from idemgate.core.calls import Batch
from idemgate.gate import Gate
from idemgate.guard.claim_calls import Claims, Record
from idemgate.operate.verb import Given, Parameter, Verb
from idemgate.store.nodes import servers

__all__ = ["HELD_VERBS"]


def list_held(gate: Gate, given: Given) -> list[dict[str, Any]]:
    """Return the held keys, in no order."""
    found: dict[bytes, dict[str, Any]] = {}  # SCAN may return a key twice
    for key, record in _read_records(gate):
        if record.state == "held":
            found[key] = _row(gate.namespace, key, record)
            if len(found) == (given["limit"] or 50):
                break
    return list(found.values())


def _read_records(gate: Gate) -> Iterator[tuple[bytes, Record]]:
    """Yield all records of the namespace. They are read in pipelines, as SCAN finds their keys."""
    claims = Claims(gate.namespace, gate.context.clock)
    pattern = keys.patterns(gate.namespace)["records"].encode()
    with servers(gate.context.endpoint) as found:
        for server in found:
            for batch in server.scan(pattern):
                names = [key for key in batch if keys.owner_of(gate.namespace, key).kind == "once"]
                requests = [claims.inspect((key,)) for key in names]
                yield from zip(names, gate.context.link.run_all(Batch(requests, list)), strict=True)


def _row(namespace: str, key: bytes, record: Record) -> dict[str, Any]:
    before = len(keys.patterns(namespace)["records"]) - 1
    scope, _, name = key[before:-1].decode().partition(":")
    return {
        "scope": unquote(scope), "key": unquote(name), "since": record.since, "attempts": record.attempts,
        "taken_over": record.taken_over, "token": record.token, "owner": record.owner or None,
    }  # fmt: skip


HELD_VERBS = (
    Verb(
        "held", "ls", "list the keys whose owner lost its lease and that wait for `key resolve`. It SCANs all keys of "
        "the server, so the user needs the role auditor, too. A long key is shown as # and its hash", list_held,
        (Parameter("limit", "stop after N keys (default: 50)", "count"),),
    ),
)  # fmt: skip
