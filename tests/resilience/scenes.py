"""What the processes do that are killed, and those that recover. Each leaves a trace in Redis beside idemgate's own
keys."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import msgpack
import redis

from idemgate import Gate, current
from idemgate.core.calls import Call
from idemgate.testing import Clock, History
from idemgate.topics.messages import SettledAndTaken, Taken
from idemgate.worker.worker import Worker
from tests.resilience.points import reach, times

__all__ = ["SCENES"]

Order = dict[str, Any]

FENCED = """
local token = tonumber(redis.call("HGET", KEYS[1], ARGV[1]) or 0)
if tonumber(ARGV[2]) < token then return 0 end
redis.call("HSET", KEYS[1], ARGV[1], ARGV[2])
return 1
"""
"""Overwrites the row of a key, and refuses a lower token than it has seen."""


def opened(order: Order) -> tuple[Gate, Any]:
    gate = Gate(order["url"], namespace=order["namespace"], clock=Clock(order["now"]))
    return gate, redis.Redis.from_url(order["url"])


def told(order: Order, raw: Any) -> History:
    """What this process runs, told to Redis at once, since it may die."""
    return History(lambda event: raw.rpush(f"{order['namespace']}:history", event.to_json()))


# -- a guarded function -----------------------------------------------------------------------------------------------


def guarded(order: Order) -> Callable[[], object]:
    """Build the scene of a guarded charge, with two effects: a list of fencing tokens, and a row that has a fence."""
    gate, raw = opened(order)
    name, topic, history = order["namespace"], gate.topic("mails"), told(order, raw)

    ran: list[int] = []

    def effect(token: int) -> None:
        reach("before effect")
        raw.rpush(f"{name}:effects", token)
        raw.eval(FENCED, 1, f"{name}:fenced", order["key"], token)
        reach("after effect")

    def fail_first() -> None:
        if "fails" in order["with"] and current().attempt == 1:
            raise ConnectionError("the bank is closed")

    def run(key: str) -> Any:
        token, attempt = current().token, current().attempt
        ran.append(token)
        return history.run(key, token, attempt, work=key)

    def charge(key: str) -> str:
        with run(key):
            fail_first()
            if "trigger" in order["with"]:
                topic.trigger(key, 1, event_id=key)
            if "linger" in order["with"]:
                time.sleep(order["linger"])
            if current().recovered is None:
                effect(current().token)
            if "checkpoint" in order["with"]:
                current().checkpoint("charged")
            return f"receipt for {key}"

    async def charge_async(key: str) -> str:
        with run(key):
            fail_first()
            if "trigger" in order["with"]:
                await topic.aio.trigger(key, 1, event_id=key)
            if "linger" in order["with"]:
                await asyncio.sleep(order["linger"])
            if current().recovered is None:
                effect(current().token)
            if "checkpoint" in order["with"]:
                await current().aio.checkpoint("charged")
            return f"receipt for {key}"

    once = gate.once(key="{key}", scope="charge", lease=order["lease"])

    def scene() -> object:
        try:
            if order["flavour"] == "async":
                said: object = asyncio.run(once(charge_async)(order["key"]))
            else:
                said = once(charge)(order["key"])
        except ConnectionError as error:
            return f"failed: {error}"
        if ran:
            history.record_done(order["key"], ran[-1], work=order["key"])
        return said

    return scene


# -- a worker ---------------------------------------------------------------------------------------------------------


def work(order: Order) -> Callable[[], object]:
    """Works until nothing is left that is due at its time, and it holds nothing. Handlers note each run, with its
    payload."""
    gate, raw = opened(order)
    topic = gate.topic(
        "t", merge="append", slots=2, lease=order["lease"], max_attempts=order["max_attempts"], backoff=0
    )
    follow, history = gate.topic("follow"), told(order, raw)

    @contextmanager
    def noted(delivery: Any) -> Generator[None]:
        with history.delivery(delivery, note=delivery.payload):
            reach("in handler")
            if delivery.key == order.get("poison"):
                os.kill(os.getpid(), signal.SIGKILL)
            yield

    def fail_first(delivery: Any) -> None:
        if "fails" in order["with"] and delivery.attempt == 1:
            raise ConnectionError("the bank is closed")

    def handle(delivery: Any) -> None:
        with noted(delivery):
            if "trigger" in order["with"]:
                follow.trigger(delivery.key, 1, event_id=delivery.key)
            if "linger" in order["with"]:
                time.sleep(order["linger"])
            fail_first(delivery)

    async def handle_async(delivery: Any) -> None:
        with noted(delivery):
            if "trigger" in order["with"]:
                await follow.aio.trigger(delivery.key, 1, event_id=delivery.key)
            if "linger" in order["with"]:
                await asyncio.sleep(order["linger"])
            fail_first(delivery)

    topic.handler(handle_async if order["flavour"] == "async" else handle)

    def idle(worker: Worker) -> bool:
        looked = times("after topics/take") >= topic.policy.slots
        return looked and not any(consumer.in_flight for consumer in worker._consumers)

    async def until_empty() -> None:
        async with Worker(gate, concurrency=order["concurrency"], prefetch=order["prefetch"]) as worker:
            while not (idle(worker) and (await topic.aio.stats()).ready == 0 and idle(worker)):
                await asyncio.sleep(0.002)

    return lambda: asyncio.run(until_empty())


# -- a worker that lives until it is killed, among others -------------------------------------------------------------


def serve(order: Order) -> Callable[[], object]:
    """Works on groups, and tells a list (the recorder) what it takes, and when each attempt starts, ends, and is
    settled. The places in the list are the order of all that happened, in all processes: `begin` and `end` are said
    from within the handler. While the key `<namespace>:hold` is there no handler ends, while `<namespace>:hold:<group>`
    none of that group, while `<namespace>:hold:<life>` none of this process."""
    gate = Gate(order["url"], namespace=order["namespace"])
    topic = gate.topic("t", slots=order["slots"], lease=order["lease"], backoff=0)
    raw, events, life = redis.Redis.from_url(order["url"]), f"{order['namespace']}:events", order["life"]
    drawn = random.Random(f"{order['seed']} {life}")
    hold = f"{order['namespace']}:hold"

    def say(*what: Any) -> None:
        raw.rpush(events, json.dumps(what))

    def begin(delivery: Any) -> None:
        facts = [delivery.slot, delivery.due_ms, delivery.attempt]
        say("begin", life, delivery.group, delivery.payload, delivery.token, *facts)

    def held(delivery: Any) -> bool:
        return raw.exists(hold, f"{hold}:{delivery.group}", f"{hold}:{life}") > 0

    def end(delivery: Any) -> None:
        say("end", life, delivery.group, delivery.payload, delivery.token)

    def handle(delivery: Any) -> None:
        begin(delivery)
        time.sleep(drawn.uniform(0, order["linger"]))
        while held(delivery):
            time.sleep(0.01)
        end(delivery)

    async def handle_async(delivery: Any) -> None:
        begin(delivery)
        await asyncio.sleep(drawn.uniform(0, order["linger"]))
        while held(delivery):
            await asyncio.sleep(0.01)
        end(delivery)

    answer = Call.answer

    def _endings(packed: bytes) -> list[tuple[str, int]]:
        flat = msgpack.unpackb(packed, raw=True)
        return [(key.decode(), token) for key, token in zip(flat[::2], flat[1::2], strict=True)]

    def answered(self: Call[Any], reply: Any) -> Any:
        if self.script.name in ("topics/settle", "topics/settle_and_take"):
            say("settled", life, reply[1], _endings(self.args[3]))
        found = answer(self, reply)
        taken = found.taken if isinstance(found, SettledAndTaken) else found
        if isinstance(taken, Taken):
            say("took", life, [(one.token, one.key) for one in taken.deliveries])
        return found

    Call.answer = answered  # type: ignore[method-assign]
    topic.handler(handle_async if life % 2 else handle)
    return lambda: gate.run(concurrency=order["concurrency"])


SCENES = {"guarded": guarded, "work": work, "serve": serve}
