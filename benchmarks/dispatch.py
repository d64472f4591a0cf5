"""What a script call costs the server, piece by piece: CPU, of scripts that differ in one thing, sent 100 at a time."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import redis

from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import port_of, spent, started
from idemgate.core.calls import new_id
from idemgate.guard.claim_calls import Claims

__all__ = ["NOTHING", "run"]

NOTHING = "a script that does nothing, with five arguments"
PIECES = {
    NOTHING: 'return "s"',
    "TIME, as a number": 'local t = redis.call("TIME") local n = t[1] * 1000000 + t[2] return "s"',
    "GET of a missing key": 'local g = redis.call("GET", KEYS[1]) return "s"',
    "SET with an expiry": 'redis.call("SET", KEYS[1], ARGV[2], "PX", ARGV[4]) return "s"',
    "a function that is defined": 'local function f() return ARGV[1] end return "s"',
    "a table of ten fields": "local t = { a = 1, b = 2, c = 3, d = 4, e = 5, f = 6, g = 7, h = 8, i = 9, j = 10 } "
    'return "s"',
    "a reply of six places instead of one string": 'return { "started", 1, 2, 3, 4, "" }',
}
TOGETHER = 100


def run(plan: Plan) -> list[Row]:
    """The rows, `server_us` only."""
    n = plan.size(20_000)
    costs: dict[str, list[float]] = defaultdict(list)
    with started() as server:
        client = redis.Redis(port=port_of(server))
        for repetition in range(plan.repetitions):
            for name, text in PIECES.items():
                sha = client.script_load(text)
                rest = ("", os.urandom(16), "", 86_430_000, b"some terms..")
                commands = [("EVALSHA", sha, 1, _key(repetition, at), *rest) for at in range(n)]
                costs[name].append(_cost(server, client, commands)[0])
            _guard(server, client, n, repetition, costs)
            print(".", end="", flush=True)
    print()
    return [{"who": "script", "step": name, "server_us": figures} for name, figures in costs.items()]


def _guard(server: Any, client: Any, n: int, repetition: int, costs: dict[str, list[float]]) -> None:
    """The guard's own scripts: first calls, and replays of them."""
    claims, owners = Claims("bench", None), [new_id() for _ in range(n)]
    records = [claims.key("s", _key(repetition, at)) for at in range(n)]

    def asked(call: Any) -> tuple[Any, ...]:
        return ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)

    calls = [claims.claim(record, owner, 30_000, 86_400_000) for record, owner in zip(records, owners, strict=True)]
    client.script_load(calls[0].script.text)
    cost, replies = _cost(server, client, [asked(call) for call in calls])
    costs["the whole script of a claim that starts"].append(cost)
    fences = [call.read(reply).token for call, reply in zip(calls, replies, strict=True)]
    ends = [
        claims.complete(record, owner, fence, 86_400_000, b"v", b"\x01" + b"x" * 30)
        for record, owner, fence in zip(records, owners, fences, strict=True)
    ]
    client.script_load(ends[0].script.text)
    costs["the whole script of a completion"].append(_cost(server, client, [asked(call) for call in ends])[0])
    again = [claims.claim(record, new_id(), 30_000, 86_400_000) for record in records]
    costs["the whole script of a replay"].append(_cost(server, client, [asked(call) for call in again])[0])


def _key(repetition: int, at: int) -> str:
    return f"order-{repetition}-{at:09}"


def _cost(server: Any, client: Any, commands: list[tuple[Any, ...]]) -> tuple[float, list[Any]]:
    before, replies = spent(server), []
    for start in range(0, len(commands), TOGETHER):
        pipeline = client.pipeline(transaction=False)
        for words in commands[start : start + TOGETHER]:
            pipeline.execute_command(*words)
        replies += pipeline.execute()
    return (spent(server).cpu - before.cpu) / len(commands) * 1e6, replies
