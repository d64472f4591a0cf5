"""Bytes of the server's memory per remembered key: 21-byte keys, as many of each kind; and what the server takes for
any string of that size under a key of that size, with an expiry. On each server that is here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.contestants import begin, contestants, end
from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import port_of, programs, started, used_memory
from idemgate import Gate, Trigger
from tests.claims import claims_of

__all__ = ["run"]

RESULT = "a result of just thirty bytes."
SMALL = "sixteen bytes..."
PEERS = {"by_hand": "first", "idemkit": "first", "powertools": "first", "idempotency_kit": "first_async"}


def run(plan: Plan) -> list[Row]:
    """The rows, whose `step` is the server; `bytes` has one figure: memory does not vary. Peers on the first only."""
    n = 16_000 if plan.share >= 1 else 4_000  # just below a power of two, where Redis's tables are full
    many = 200_000 if plan.share >= 1 else 50_000  # of what is for many, and shares keys
    rows: list[Row] = []
    for name, program in programs().items():
        with started(program=program) as server:
            url = f"redis://127.0.0.1:{port_of(server)}/0"
            sizes = _idemgate(server, url, n, many) | ({} if rows else _peers(server, url, n))
        rows += ({"who": who, "step": name, "bytes": [size], "ops": [n]} for who, size in sizes.items())
    print()
    return rows


def _idemgate(server: Any, url: str, n: int, many: int) -> dict[str, float]:
    with Gate(url, namespace="bench") as gate:
        sizes = {who: _grown(server, keep, n) for who, keep in _kinds(gate, server).items()}
        shared = {who: _grown(server, keep, many) for who, keep in _shared(gate, server).items()}
    return sizes | shared


def _peers(server: Any, url: str, n: int) -> dict[str, float]:
    with contestants(list(PEERS), url) as sides:
        return {who: _grown(server, partial(_ask, side, PEERS[who]), n) for who, side in sides.items()}


def _kinds(gate: Gate, server: Any) -> dict[str, Callable[[int], object]]:
    def done(n: int) -> None:
        for number in range(n):
            gate.claim(f"order:{number:015}", scope="o").complete(RESULT)

    def first(n: int) -> None:
        for at in range(0, n, 200):  # in parts: what waits in buffers would count
            gate.first_many([f"order:{number:015}" for number in range(at, at + 200)], "24h", scope="o")

    def plain(n: int) -> None:
        for number in range(n):
            server.set(f"order:{number:015}", "1", px=86_400_000)

    return {
        "idemgate, with a 30-byte result": done,
        "its floor: a bare SET PX of such a key and value": lambda n: _bare(gate, server, done, n),
        "idemgate, no result": first,
        "its floor, too": lambda n: _bare(gate, server, first, n),
        "a bare SET PX of the 21 bytes alone": plain,
        "idemgate, a pending message": lambda n: _pending(gate, server, n),
        "its floor: a bare ZADD and HSET": lambda n: _bare_messages(server, n),
        "idemgate, a message in flight": lambda n: _in_flight(gate, server, n),
    }


def _shared(gate: Gate, server: Any) -> dict[str, Callable[[int], object]]:
    """What is for many, and shares keys."""
    return {
        "idemgate, compact": lambda n: _dedup_ids(gate, n),
        "idemgate, compact, 16-byte result": lambda n: _dedup_values(gate, n),
        "idemgate, event id of a topic": lambda n: _events(gate, server, n),
    }


def _bare(gate: Gate, server: Any, keep: Callable[[int], object], n: int) -> None:
    """Keys and values as long as those of that kind, and nothing else of it."""
    keep(1)
    name = claims_of(gate).key("o", f"order:{0:015}")[0].decode()
    value = "x" * server.strlen(name)
    for number in range(n):
        server.set(f"{name[:-16]}{number:015}}}", value, px=86_400_000)


def _dedup_ids(gate: Gate, n: int) -> None:
    """Add many more ids than of the other kinds: they share pages."""
    dedup = gate.dedup("o", "24h")
    for at in range(0, n, 1_000):
        ids = (f"order:{number:015}" for number in range(at, at + 1_000))
        dedup.add_many(ids)


def _dedup_values(gate: Gate, n: int) -> None:
    dedup = gate.dedup("o", "24h")
    for at in range(0, n, 1_000):
        pairs = ((f"order:{number:015}", SMALL) for number in range(at, at + 1_000))
        dedup.get_or_set_many(pairs)


def _events(gate: Gate, server: Any, n: int) -> None:
    """What is remembered of triggers whose messages are done."""
    topic = gate.topic("events", merge="count")
    for at in range(0, n, 500):
        topic.trigger_many([Trigger("k", event_id=f"order:{number:015}") for number in range(at, at + 500)])
    topic.ack(topic.take(1))
    _forget_replies(server)


def _pending(gate: Gate, server: Any, n: int) -> None:
    """With a payload of 30 bytes."""
    topic = gate.topic("memory")
    for at in range(0, n, 500):
        topic.trigger_many([(f"order:{number:015}", RESULT) for number in range(at, min(n, at + 500))])
    _forget_replies(server)


def _bare_messages(server: Any, n: int) -> None:
    """Store keys with a due time, and keys with a payload, as packed by a topic."""
    payload = "x" * (len(RESULT) + 1)
    for at in range(0, n, 500):
        keys = [f"order:{number:015}" for number in range(at, min(n, at + 500))]
        with server.pipeline(transaction=False) as pipeline:
            pipeline.hset("messages", mapping=dict.fromkeys(keys, payload))
            pipeline.zadd("scheduled", dict.fromkeys(keys, 1700000000000 + at)).execute()


def _in_flight(gate: Gate, server: Any, n: int) -> None:
    _pending(gate, server, n)
    assert len(gate.topic("memory").take(n)) == n
    _forget_replies(server)


def _forget_replies(server: Any) -> None:
    """Deletes the kept replies, which expire after a minute."""
    server.delete(*server.scan_iter("*:replies[01]"))


def _ask(side: Any, step: str, n: int) -> None:
    begin(side, step, tag="order-000000000", n=n, **({"tasks": 1} if step == "first_async" else {}))
    end(side)


def _grown(server: Any, keep: Callable[[int], object], n: int) -> float:
    """Return the memory that `n` keys add. A first, smaller run opens the connections."""
    server.flushall()
    keep(max(1_000, n // 10))
    server.flushall()
    before = _data_memory(server)
    keep(n)
    print(".", end="", flush=True)
    return (_data_memory(server) - before) / n


def _data_memory(server: Any) -> int:
    """Return the used memory without scripts and the garbage of the interpreter, which would count as data."""
    server.script_flush()
    return int(used_memory(server))
