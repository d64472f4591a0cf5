"""The longest time for which one script holds the server, at default settings: the server is one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.measuring import Row
from benchmarks.peers.speak import payload
from benchmarks.plan import Plan
from benchmarks.server import port_of, started
from idemgate import Gate, Trigger
from idemgate.lua import names, script
from idemgate.topics.deliveries import Settlement
from idemgate.worker.consumer import MAX_SETTLED

__all__ = ["run"]


def run(plan: Plan) -> list[Row]:
    """A row a script, from the slow log: `ms` is the longest of each repetition. Those below 0.05 ms have none."""
    found: dict[str, Row] = {}
    with started("--slowlog-log-slower-than", "50", "--slowlog-max-len", "100000") as server:
        for repetition in range(plan.repetitions):
            with Gate(f"redis://127.0.0.1:{port_of(server)}/0", namespace="bench") as gate:
                for work, of in (
                    (_guard, ""),
                    (_results, ", 100 kB a result"),
                    (_topic, ""),
                    (_large, ", 100 kB a message"),
                    (_met, ", meets 100 kB"),
                    (_items, ", meets 300 items"),
                    (_blocked, ", 1,000 blocked groups"),
                ):
                    server.flushall()
                    server.slowlog_reset()
                    work(gate, f"r{repetition}", plan)
                    _note(server, found, of)
            print(".", end="", flush=True)
    print()
    return sorted(found.values(), key=lambda row: -max(row["ms"]))


def _guard(gate: Gate, tag: str, plan: Plan) -> None:
    keys = [f"{tag}:{number}" for number in range(plan.size(2_000))]
    for key in keys:
        gate.claim(key).complete("a result of just thirty bytes.")
    claims = gate.claim_many([key + "-batch" for key in keys], retention="1h")
    gate.complete_many([(claim, "a result of just thirty bytes.") for claim in claims[::2]])
    gate.release_many(claims[1::2])
    gate.claim_many([key + "-batch" for key in keys])
    gate.first_many(keys, "24h")
    dedup = gate.dedup("s", "24h")
    dedup.add_many(keys)
    dedup.get_or_set_many([(key, "sixteen bytes...") for key in keys])


def _results(gate: Gate, tag: str, plan: Plan) -> None:
    """Claims of a batch whose bytes decide how many of them go at once."""
    keys = [f"{tag}-large:{number}" for number in range(plan.size(200))]
    claims = gate.claim_many(keys)
    for claim in claims[1::2]:
        claim.checkpoint("x" * 100_000)
    gate.complete_many([(claim, "x" * 100_000) for claim in claims[::2]])
    gate.release_many(claims[1::2])
    gate.claim_many(keys)


def _topic(gate: Gate, tag: str, plan: Plan) -> None:
    """Full batches on top of what is there: triggers, new and merging ones, also such as ask for more; what is taken,
    and as many settled as go at once, also in turns, as a worker does."""
    topic, n = gate.topic(tag), plan.size(20_000)
    triggers = [Trigger(f"key:{number}", payload(number)) for number in range(n)]
    topic.trigger_many(triggers)
    topic.trigger_many(triggers[: n // 2])
    topic.trigger_many([Trigger(f"key:{number}", 1, event_id=number, version=2) for number in range(n // 10)])
    topic.stats()
    for end_them in (topic.ack, topic.nack):
        _through(topic, end_them, n // 4)
    for verb in ("ack", "nack"):
        _turning(gate, topic.open(), verb, n // 8)
    topic.flush()
    _through(topic, topic.bury, n // 4)
    _behind(gate.topic(f"{tag}-behind", window="1h"), triggers[: n // 10])


def _behind(topic: Any, triggers: list[Trigger]) -> None:
    """All that waits behind deliveries, and much more that waits for its time, is made due at once."""
    topic.trigger_many([Trigger(one.key, one.payload, delay=0) for one in triggers])
    while topic.take(100):
        pass
    topic.trigger_many(triggers)
    topic.flush()


def _large(gate: Gate, tag: str, plan: Plan) -> None:
    """The same with messages so large that their bytes decide how many of them go at once."""
    topic, n = gate.topic(f"{tag}-large"), plan.size(200)
    triggers = [Trigger(f"key:{number}", "x" * 100_000) for number in range(n)]
    for end_them in (topic.ack, topic.nack, topic.bury):
        topic.trigger_many(triggers)
        topic.trigger_many(triggers)
        _through(topic, end_them, n)
        topic.flush()
    topic.dead.redrive()
    topic.forward("list", keep=10)
    topic.forward_once(2 * n)


def _met(gate: Gate, tag: str, plan: Plan) -> None:
    """Small triggers and deliveries, 128 at a time, that meet large messages: what they join, and what waits behind."""
    n = min(plan.size(200), 400)
    keys = [f"key:{number}" for number in range(n)]
    for merge in ("first", "append"):
        topic = gate.topic(f"{tag}-{merge}", merge=merge, window="1h")
        topic.trigger_many([Trigger(key, "x", delay=0) for key in keys])
        held = topic.take(n)
        for length in (100_000, 1):
            topic.trigger_many([Trigger(key, "x" * length) for key in keys])
        for part, end_them in ((held[::2], topic.ack), (held[1::2], topic.nack)):
            end_them(part)
        topic.trigger_many([Trigger(key, "x") for key in keys])


def _items(gate: Gate, tag: str, plan: Plan) -> None:
    """The same that meet small messages of many values: what is merged item by item, and field by field."""
    n = min(plan.size(200), 400)
    keys = [f"key:{number}" for number in range(n)]
    unions: tuple[object, object] = (list(range(300)), [1])
    sums: tuple[object, object] = ({f"field{number}": number for number in range(20)}, {"field1": 2})
    policies: list[tuple[str, Any, tuple[object, object]]] = [("union", "union", unions), ("sums", {"*": "sum"}, sums)]
    for name, merge, (many, few) in policies:
        topic = gate.topic(f"{tag}-{name}", merge=merge, window="1h")
        topic.trigger_many([Trigger(key, few, delay=0) for key in keys])
        held = topic.take(n)
        for values in (many, few):
            topic.trigger_many([Trigger(key, values) for key in keys])
        for part, end_them in ((held[::2], topic.ack), (held[1::2], topic.nack)):
            end_them(part)
        topic.flush()
        _through(topic, topic.nack, n)


def _blocked(gate: Gate, tag: str, plan: Plan) -> None:
    """Groups that are full, each with messages of many priorities behind its delivery."""
    topic, n = gate.topic(f"{tag}-blocked", priority=True, priority_boost="1s"), plan.size(20_000)
    topic.trigger_many([Trigger(f"key:{i}", priority=i % 97, group=f"g{i % (n // 20)}") for i in range(n)])
    while topic.stats().blocked < n - n // 20:
        topic.take(100)
    topic.stats()


def _through(topic: Any, end_them: Callable[[Any], object], n: int) -> None:
    done = 0
    while done < n:
        taken = topic.take(100)
        topic.extend(taken)
        end_them(taken)
        done += max(1, len(taken))


def _turning(gate: Gate, calls: Any, verb: str, n: int) -> None:
    held = gate.context.link.run(calls.take(0, MAX_SETTLED)).deliveries
    many = min(MAX_SETTLED, calls.max_settlements([Settlement(verb, one) for one in held]))
    for _ in range(n // many):
        endings = [Settlement(verb, one) for one in held[:many]]
        held = held[many:] + gate.context.link.run(calls.settle_and_take(0, endings, many)).taken.deliveries


def _note(server: Any, found: dict[str, Row], of: str) -> None:
    names = _names()
    longest: dict[str, float] = {}
    for entry in server.slowlog_get(100_000):
        words = entry["command"].split(b" ", 2)
        if words[0].upper() == b"EVALSHA" and words[1] in names:
            name = names[words[1]]
            longest[name] = max(longest.get(name, 0.0), entry["duration"] / 1000)
    for name, ms in longest.items():
        found.setdefault(name + of, {"who": name + of, "step": "block", "ms": []})["ms"].append(ms)


def _names() -> dict[bytes, str]:
    """Every script by its digest."""
    return {_bytes(script(name).sha): name for name in names()}


def _bytes(sha: str | bytes) -> bytes:
    return sha if isinstance(sha, bytes) else sha.encode()
