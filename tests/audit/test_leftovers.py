"""Calls that an access list refuses after a part of their writes. The auditor finds what they leave, the commands that
it prints mend it, and then every trigger is delivered.

Scripts ask for the rights of their user before they write. Redis before 7.0 cannot be asked, and the user "default" is
not. Here no user is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from idemgate import Gate, Trigger
from idemgate.cli.acl_rules import user_name
from idemgate.core.codec import Codec
from idemgate.errors import ServerRejected
from idemgate.lua import commands
from idemgate.testing import Clock, audit
from idemgate.topics.merge import pack
from tests.audit.mending import run_commands
from tests.conftest import Face
from tests.messages import pack_message
from tests.security.test_acl import dumped, restored

OLD = range(1, 8)
"""The payloads that the topic holds before a call."""


class Scene(NamedTuple):
    """A topic that holds OLD. 1 is in flight in a group, and 2 is next in this group. 3 is in flight, and 5 is behind
    it. 4 is a dead letter, 6 is due, and 7 is due later."""

    topic: Any
    grouped: Any
    plain: Any
    clock: Clock


class Operation(NamedTuple):
    """A call and its script. It may end some of OLD, and brings new payloads."""

    call: Callable[[Scene], Awaitable[Any]]
    script: str
    ends: frozenset[int] = frozenset()
    brings: frozenset[int] = frozenset()


async def take_lapsed(on: Scene) -> None:
    on.clock.advance("2h")
    await on.topic.take(5)


def letter(on: Scene) -> bytes:
    """A dead letter with the payload 100, as it is stored."""
    now_us = on.clock.microseconds()
    message = pack_message(pack([1, 0, pack(Codec().encode(100))]), first=now_us // 1000, last=now_us // 1000)
    return pack([b"new", message, b"no", now_us // 1000, now_us - 5])


def adopt(on: Scene) -> Awaitable[Any]:
    done: Awaitable[Any] = on.topic.run(lambda calls: calls.adopt_letters("other", [letter(on)]).calls[0])
    return done


NEW, NEW_ONES = frozenset({100}), frozenset({100, 101, 102, 103})
MANY = [Trigger("new", 100), Trigger("plain", 101), Trigger("later", 102), Trigger("g3", 103, group="g")]
OPERATIONS = {
    "trigger": Operation(lambda on: on.topic.trigger("new", 100), "topics/trigger", brings=NEW),
    "trigger many": Operation(lambda on: on.topic.trigger_many(MANY), "topics/trigger", brings=NEW_ONES),
    "trigger earlier": Operation(lambda on: on.topic.trigger("later", 100, delay=0), "topics/trigger", brings=NEW),
    "take": Operation(lambda on: on.topic.take(5), "topics/take"),
    "take lapsed": Operation(take_lapsed, "topics/take"),
    "ack": Operation(lambda on: on.topic.ack(on.plain), "topics/settle", frozenset({3})),
    "ack in a group": Operation(lambda on: on.topic.ack(on.grouped), "topics/settle", frozenset({1})),
    "nack": Operation(lambda on: on.topic.nack(on.plain), "topics/settle"),
    "nack in a group": Operation(lambda on: on.topic.nack(on.grouped), "topics/settle"),
    "release": Operation(lambda on: on.topic.release(on.grouped), "topics/settle"),
    "bury": Operation(lambda on: on.topic.bury(on.plain), "topics/settle"),
    "extend": Operation(lambda on: on.topic.extend([on.grouped, on.plain]), "topics/extend"),
    "cancel": Operation(lambda on: on.topic.cancel("later"), "topics/cancel", frozenset({7})),
    "bury a key": Operation(lambda on: on.topic.bury("later"), "topics/cancel"),
    "reschedule": Operation(lambda on: on.topic.reschedule("later", delay=0), "topics/reschedule"),
    "reset version": Operation(lambda on: on.topic.reset_version("later"), "topics/versions/reset"),
    "flush": Operation(lambda on: on.topic.flush("later"), "topics/flush"),
    "flush all": Operation(lambda on: on.topic.flush(), "topics/flush"),
    "redrive": Operation(lambda on: on.topic.dead.redrive(), "topics/take_dead"),
    "load a letter": Operation(lambda on: on.topic.dead.load([letter(on)]), "topics/dead/load", brings=NEW),
    "adopt a letter": Operation(adopt, "topics/dead/adopt", brings=NEW),
    "delete letters": Operation(lambda on: on.topic.dead.delete(), "topics/take_dead", frozenset({4})),
}
FOUND = {
    ("trigger", "ZADD"): {"unplaced", "conservation"},
    ("trigger many", "ZADD"): {"unplaced", "conservation"},
    ("ack", "HSET"): {"orphan", "conservation"},
    ("ack", "ZADD"): {"unplaced", "conservation"},
    ("nack", "ZADD"): {"unplaced"},
    ("release", "ZADD"): {"unplaced", "held"},
    ("bury", "ZADD"): {"unplaced", "orphan"},
    ("bury a key", "ZADD"): {"orphan"},
    ("reschedule", "HSET"): {"unplaced"},
    ("redrive", "ZADD"): {"unplaced"},
}
"""What the auditor finds after a call without a command, in a topic without priorities."""
FEW = {"trigger", "take", "ack", "nack"}


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No script asks for the rights of its user before it writes."""
    for module in ("connection", "connection_aio"):
        monkeypatch.setattr(f"idemgate.store.{module}.checks_rights", lambda _settings: False)


async def set_scene(topic: Any, clock: Clock) -> Scene:
    for payload, (key, group) in enumerate([("g1", "g"), ("g2", "g"), ("plain", None), ("dies", None)], 1):
        await topic.trigger(key, payload, group=group)
        clock.advance("1ms")
    taken = {one.key: one for one in await topic.take(10)}
    await topic.bury(taken["dies"])
    await topic.trigger("plain", 5)
    await topic.trigger("due", 6)
    await topic.trigger("later", 7, delay="1m")
    return Scene(topic, taken["g1"], taken["plain"], clock)


def mend(gate: Gate, raw: Any) -> None:
    """Run all commands that the auditor prints. What one of them mends may show another finding."""
    for _ in range(4):
        run_commands(raw, audit(gate).findings)


async def drained(topic: Any, clock: Clock) -> Counter[int]:
    """How often each payload is delivered within a day."""
    delivered = Counter[int]()
    for _ in range(12):
        clock.advance("2h")
        await topic.dead.redrive()
        for one in await topic.take(100):
            delivered.update(one.payload)
            await topic.ack(one)
    return delivered


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("policy", [{}, pytest.param({"priority": True}, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "awaiting", [pytest.param(False, id="blocking"), pytest.param(True, id="awaiting", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in OPERATIONS]
)
async def test_after_a_refused_call_is_mended_every_trigger_is_delivered(
    gate: Gate,
    raw: Any,
    users: Callable[..., str],
    namespace: str,
    clock: Clock,
    name: str,
    awaiting: bool,
    policy: dict[str, Any],
) -> None:
    operation, user, wrong = OPERATIONS[name], user_name(["admin"], namespace), list[str]()
    with Gate(users("admin"), namespace=namespace, clock=clock, timeout="30s") as theirs:
        topic = Face(theirs, awaiting).topic("t", merge="append", lease="1h", backoff="1s", **policy)
        scene = await set_scene(topic, clock)
        saved, start = dumped(raw, namespace), clock.now().timestamp()
        for command in sorted(commands(operation.script)):
            restored(raw, namespace, saved)
            clock.set(start)
            # Given a user who lacks a command of the script, When it makes the call
            raw.execute_command("ACL", "SETUSER", user, f"-{command.lower()}")
            refused = await is_refused(operation, scene)
            raw.execute_command("ACL", "SETUSER", user, f"+{command.lower()}")
            # Then the auditor finds what is left of it, and prints what mends it
            found = {*audit(gate).by_kind}
            if not policy and found != FOUND.get((name, command), found):
                wrong.append(f"without {command}: found {found}")
            mend(gate, raw)
            # And every trigger is delivered once, also those of the call, unless it was refused
            delivered = await drained(topic, clock)
            wanted = {*OLD} - operation.ends | (set[int]() if refused else operation.brings)
            missing = {one for one in wanted if not delivered[one]}
            twice = {one for one, times in delivered.items() if times > 1}
            left = {*audit(gate).by_kind} - {"conservation"}
            if missing or twice or left:
                wrong.append(f"without {command}: missing {missing}, twice {twice}, left {left}")
        await theirs.aio.close()
    assert wrong == []


async def is_refused(operation: Operation, scene: Scene) -> bool:
    try:
        await operation.call(scene)
    except ServerRejected:
        return True
    return False
