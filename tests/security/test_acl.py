"""Each role may do what it needs, and is refused the rest, with nothing written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.audit.slot import Slot, read_slot
from idemgate.cli import main
from idemgate.cli.acl_rules import ROLES, rule
from idemgate.core import keys
from idemgate.core.calls import Call, new_id
from idemgate.core.keys import patterns
from idemgate.errors import IdemgateError, InvalidArgument, ServerRejected
from idemgate.guard.claim_calls import register_retention
from idemgate.guard.heartbeat import note_history
from idemgate.history.calls import read_history
from idemgate.lua import commands, names
from idemgate.membership import heartbeats as members
from idemgate.operate.acts import acts_call, record_call
from idemgate.operate.keys import scopes_call
from idemgate.presence import calls as presence
from idemgate.subscribers.expiry.rules import look
from idemgate.subscribers.list_entries import ListCalls
from idemgate.subscribers.stream_group import Group, PendingEntry
from idemgate.testing import Clock, audit
from idemgate.topics import registry
from idemgate.topics import reshard as resizing
from idemgate.topics.dead_letters import DeadFilter
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Forward, Position, Ticket, Trigger
from idemgate.topics.slots import open_topic, stored_policy
from tests.claims import claims_of
from tests.dedup.dedup_calls import calls_of

pytestmark = pytest.mark.one_in(3)

# -- what each role is for works --------------------------------------------------------------------------------------


async def test_a_guard_guards(faces: Callable[..., Any]) -> None:
    face = faces("guard")
    guarded = face.once(key="{n}", scope="s", fingerprint="n", on_in_progress="wait")(lambda n: n + 1)
    assert [await guarded(1) for _ in range(2)] == [2, 2]
    claim = await face.claim("k")
    assert await claim.checkpoint("half")
    assert await face.cancel("k")
    assert await claim.extend("1m")
    assert await claim.release()
    assert (await face.inspect("k")).checkpoint is not None
    assert [await face.first("f", "1h") for _ in range(2)] == [True, False]
    assert await face.first_many(["x", "y", "x"], "1h") == [True, True, False]
    dedup = face.dedup("s", "1h")
    assert [await dedup.add("f") for _ in range(2)] == [True, False]
    assert await dedup.add_many(["x", "y", "x"]) == [True, True, False]
    assert [(await dedup.get_or_set("f", value)).value for value in (1, 2)] == [1, 1]
    assert await dedup.get("f") == 1


async def test_a_waiting_guard_is_woken(faces: Callable[..., Any]) -> None:
    # Given a claim that another caller waits for
    face = faces("guard")
    claim = await face.claim("k")
    waiter = await face.claim("k")
    waiting = asyncio.create_task(waiter.wait(30))
    # When it is completed, Then the waiter gets its result, over the channel of the record
    await asyncio.sleep(0)
    await claim.complete("done")
    assert await waiting == "done"


async def test_a_producer_produces(faces: Callable[..., Any]) -> None:
    topic = faces("producer").topic("t", window="60s", priority=True)
    assert (await topic.trigger("a", 1, group="g", version=1, event_id="e", priority=3)).status == "scheduled"
    assert (await topic.trigger("a", 2, event_id="e")).status == "duplicate"
    assert [one.status for one in await topic.trigger_many([Trigger("b"), Trigger("c")])] == ["scheduled"] * 2
    assert (await topic.peek("a")).pending is not None
    assert await topic.reschedule("b", delay="1s")
    assert await topic.flush("c")
    assert await topic.cancel("b")
    assert await topic.pause()
    assert await topic.resume()


async def test_a_worker_works(faces: Callable[..., Any], clock: Clock) -> None:
    face = faces("worker")
    topic = face.topic("t", priority=True, max_attempts=1, rate="1000/s", concurrency=10)
    for key in ("a", "b", "c", "d"):
        await topic.trigger(key, key, group="g" if key < "c" else None)
    found = {one.key: one for one in await topic.take(10)}
    await topic.ack(found["a"])
    await topic.nack(found["c"])
    await topic.extend(found["d"], "1m")
    await topic.bury(found["d"])
    clock.advance("5m")
    assert [one.key for one in await topic.take(10)] == ["b"]
    assert (await topic.stats()).dead == 2
    assert await topic.dead.redrive() == 2
    assert await topic.pause()
    assert await topic.dead.delete() == 0


async def test_a_worker_runs_with_members(faces: Callable[..., Any]) -> None:
    gate: Gate = faces("worker", "guard").gate
    topic, heard = gate.topic("t", slots=4), []
    done = asyncio.Event()

    @topic.handler
    def handle(delivery: Any) -> None:
        heard.append(delivery.key)
        done.set()

    async with gate.aio.worker(membership="redis"):
        await topic.aio.trigger("k", 1)
        await asyncio.wait_for(done.wait(), 60)
    assert heard == ["k"]


async def test_a_worker_forwards_to_keys_that_were_named(faces: Callable[..., Any], namespace: str, raw: Any) -> None:
    target = f"orders-{namespace}"
    face = faces("worker", keys=[f"{target}*"])
    topic = face.topic("t")
    face.gate.topic("t").forward("stream", target)
    await topic.trigger("k", 1)
    assert await topic.forward_once() == 1
    assert raw.xlen(target) == 1
    raw.delete(target)


async def test_a_viewer_looks(faces: Callable[..., Any], gate: Gate) -> None:
    # Given a topic, a dead letter, a record and a member
    topic = gate.topic("t", window="1s")
    topic.trigger("k", 1)
    topic.flush("k")
    topic.bury(topic.take(1)[0], reason="why")
    gate.first("f", "1h")
    said = members.HeartbeatRequest("m", 1, ("t",), 0, (), (), ())
    gate.context.link.run(members.heartbeat(gate.namespace, "g", gate.context.clock, said, 60_000))
    # When a viewer looks, Then it sees all of it
    face = faces("viewer")
    seen = face.topic("t", window="1s")
    assert (await seen.stats()).dead == 1
    assert [one.reason for one in await seen.dead.list()] == ["why"]
    assert (await seen.peek("k")).pending is None
    assert (await face.inspect("f", scope="first")).state == "done"
    roll = members.list_members(gate.namespace, "g", gate.context.clock)
    assert set(face.gate.context.link.run(roll).members) == {"m"}
    found = await asyncio.to_thread(face.gate.stored_topics)
    assert [(one.name, one.stats.dead) for one in found] == [("t", 1)]


async def test_an_admin_may_do_all_of_it(faces: Callable[..., Any]) -> None:
    face = faces("admin")
    topic = face.topic("t")
    await topic.trigger("k", 1)
    await topic.bury((await topic.take(1))[0], reason="why")
    await topic.pause()
    assert await topic.resume()
    assert await topic.dead.redrive() == 1
    await face.claim("k")
    assert await face.forget("k", force=True)


@pytest.mark.parametrize("roles", [("producer",), ("worker",), ("viewer",)])
async def test_a_slot_that_has_moved_is_found(
    faces: Callable[..., Any], gate: Gate, roles: tuple[str, ...], clock: Clock
) -> None:
    # Given a topic in use
    gate.topic("t", window="60s").trigger("a", 1)
    topic = faces(*roles).topic("t", window="60s")
    assert (await topic.peek("a")).pending.count == 1
    # When an admin gives it other slots, Then its new place is found
    await faces("admin").topic("t", window="60s").reshard(4)
    assert (await topic.peek("a")).pending.count == 1
    if roles == ("viewer",):
        return
    assert (await topic.trigger("a", 2)).status == "merged"
    # And when the topic was forgotten, it is made anew
    await faces("admin").topic("t").delete(discard=True)
    assert (await topic.trigger("a", 3)).status == "scheduled"
    if roles == ("worker",):
        clock.advance("60s")
        assert [one.key for one in await topic.take(10)] == ["a"]


async def test_an_admin_may_read_all_of_it(users: Callable[..., str], gate: Gate, clock: Clock) -> None:
    gate.topic("t", window="60s").trigger("k", 1)
    gate.first("f", "1h")
    gate.dedup("s", "1h").add("f")
    gate.dedup("s", "1h").get_or_set("f", 1)
    with Gate(users("admin"), namespace=gate.namespace, clock=clock) as theirs:
        assert [one.name for one in theirs.stored_topics()] == ["t"]
        report = audit(theirs)
    assert not report.critical
    assert report.counted["pending"] == report.counted["records"] == 1


async def test_who_asks_for_durability_is_not_refused(users: Callable[..., str], gate: Gate, clock: Clock) -> None:
    # Given a server without replicas, Then it is the server that cannot, and not the user that may not
    url = users("guard", durable=True)
    with (
        Gate(url, namespace=gate.namespace, clock=clock, timeout="3s", durability=1) as theirs,
        pytest.raises(IdemgateError, match="0 of 1 replicas"),
    ):
        theirs.first("k", "1h")


async def test_who_may_not_wait_for_copies_is_refused_before_anything_is_written(
    users: Callable[..., str], gate: Gate, clock: Clock, raw: Any
) -> None:
    with Gate(users("guard"), namespace=gate.namespace, clock=clock, durability=1) as theirs:
        with pytest.raises(ServerRejected, match=r"no permissions.*EVAL and WAIT .*Nothing was written"):
            theirs.first("k", "1h")
        assert not dumped(raw, gate.namespace)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "reshard": lambda topic: topic.reshard(2),
    "forget": lambda topic: topic.delete(discard=True),
}


FROM_7, BEFORE_7 = pytest.mark.servers("7.0"), pytest.mark.servers(below="7.0")
"""Redis before 7.0 does not say what a user may do before that is done (docs/security.md)."""


@pytest.mark.parametrize("role", [*(pytest.param(role, marks=FROM_7) for role in ("producer", "worker")), "viewer"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_that_is_an_admins_is_refused_before_it_begins(
    faces: Callable[..., Any], gate: Gate, raw: Any, role: str, change: str
) -> None:
    # Given a topic that holds something
    gate.topic("t", window="60s").trigger("k", 1)
    before = dumped(raw, gate.namespace)
    # When a user changes it who may not do all of that, Then nothing is written, and it goes on
    with pytest.raises(ServerRejected, match="access list"):
        await CHANGES[change](faces(role).topic("t", window="60s"))
    assert dumped(raw, gate.namespace) == before
    assert gate.topic("t", window="60s").trigger("k", 2).status == "merged"


@BEFORE_7
@pytest.mark.parametrize("role", ["producer", "worker"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_that_is_refused_on_its_way_goes_on_when_an_admin_asks_for_the_same(
    faces: Callable[..., Any], gate: Gate, role: str, change: str
) -> None:
    # Given a topic that holds something
    gate.topic("t", window="60s").trigger("k", 1)
    # When a user changes it who may begin that and not end it, Then the call raises, and the change stands still
    with pytest.raises(ServerRejected, match="access list"):
        await CHANGES[change](faces(role).topic("t", window="60s"))
    assert set(audit(gate).by_kind) == {"changing"}
    # And when an admin asks for the same, Then it is done
    await CHANGES[change](faces("admin").topic("t", window="60s"))
    [known] = gate.stored_topics() or [None]
    assert (known and known.slots) == (2 if change == "reshard" else None)
    # And the topic works, and what it was not told to discard is still there
    again = gate.topic("t", window="60s").trigger("k", 2).status
    assert again == ("merged" if change == "reshard" else "scheduled")


@FROM_7
def test_sent_again_it_takes_selectors_away_where_the_server_knows_them(raw: Any, namespace: str) -> None:
    user = f"{namespace}-viewer"
    raw.execute_command("ACL", "SETUSER", user, "on", "nopass", "(~* +@all)")
    # Redis 7.0 knows selectors, and not all else that 7.2 does
    again = [word for word in rule(["viewer"], namespace, user, since_7_2=True) if word != "+client|setinfo"]
    raw.execute_command(*again)
    assert "~*" not in next(line for line in raw.acl_list() if user in line)
    raw.acl_deluser(user)


# -- the rest is refused ----------------------------------------------------------------------------------------------


class Scene:
    """A namespace in which something is everywhere, and every call that there is, with effect."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        claims = claims_of(gate)
        held, ran = claims.key("s", "held"), claims.key("s", "ran")
        self.owner = new_id()
        gate.context.link.run(claims.claim(held, self.owner, 30_000, 30_000, wait=True))
        gate.context.link.run(claims.claim(held, new_id(), 30_000, 30_000, wait=True))
        given = gate.context.link.run(claims.inspect(held))
        assert given is not None
        topic = gate.topic("t", window="1s", concurrency=10)
        topic.trigger_many([Trigger(key, 1, group="g" if key < "c" else None) for key in "abcde"])
        topic.flush()
        dead, kept = topic.take(2)
        topic.bury(dead, reason="why")
        [letter] = topic.dead.list()
        topic.trigger_many([Trigger(key, 1, delay="1m") for key in "xyz"])
        said = members.HeartbeatRequest("m", 1, ("t",), 0, (), (), ())
        gate.context.link.run(members.heartbeat(gate.namespace, "g", gate.context.clock, said, 60_000))
        calls = topic.definition.calls
        assert calls is not None
        dedup = calls_of(gate, "s", 3_600_000)
        gate.context.link.run(dedup.add("known"))
        gate.topic("r", result_retention="1h").trigger("k", 1)
        results = gate.topic("r").definition.calls
        assert results is not None
        # And a topic that is being given other slots, one of which holds a batch to be taken in
        moving = gate.topic("moving", window="1s", slots=1)
        moving.trigger_many([Trigger(key, 1) for key in "ab"])
        old = moving.definition.calls
        assert old is not None
        new = old.for_slots(2)
        begun = gate.context.link.run(resizing._begin(old, 2))
        for of, slot in ((new, 0), (new, 1), (old, 0)):
            gate.context.link.run(resizing._close(of, slot, begun.change))
        shown = gate.context.link.run(resizing._unload(old, 0, begun.change, 0))
        said = members.HeartbeatRequest("n", 1, ("t",), 0, (), (), ())
        group = Group(gate.context.aio_link, f"theirs-{gate.namespace}", "g", "me", 1)
        # And a list of the user's, of which one entry is held
        jobs = f"theirs-{gate.namespace}-jobs"
        entries = ListCalls(jobs, "me", gate.context.clock, lease_ms=60_000, pop="left", max_dead_letters=1)
        gate.context.link.command("RPUSH", jobs, "held", "next")
        [entry] = gate.context.link.run(entries.take(1)).entries
        self.calls = [
            claims.claim(claims.key("s", "new"), new_id(), 30_000, 30_000),
            claims.mark(claims.key("s", "other"), new_id(), 1000),
            *claims.mark_many(claims.key("s", "many"), 1000, 100),
            dedup.add("other"),
            calls_of(gate, "s", 1000).get_or_set("new", 7),
            dedup.get("new"),
            dedup.add("known"),
            claims.checkpoint(held, self.owner, b"x"),
            claims.cancel(held, given.token),
            claims.renew(held, self.owner, 40_000, 40_000),
            claims.inspect(held),
            claims.complete(held, self.owner, given.token, 1000, b"v", b"x"),
            claims.release(held, self.owner, 1000, undo=False),
            claims.forget(held, new_id(), given, force=True),
            claims.resolve(ran, new_id(), given, True, 1000, b"v", b"x"),
            register_retention(gate.context, "new", 1000),
            record_call(gate, "who", "what", "why"),
            acts_call(gate, 5),
            scopes_call(gate),
            read_history(keys.scope_history(gate.namespace, "s", b"k"), gate.context.clock, b"k"),
            note_history(gate.context, keys.scope_history(gate.namespace, "s", b"k"), [(0, b"note")]),
            presence.beat(gate.namespace, gate.context.clock, "0" * 32, b"report"),
            presence.list_ids(gate.namespace, gate.context.clock),
            presence.list_names(gate.namespace, gate.context.clock),
            presence.read_reports(gate.namespace, gate.context.clock, ["0" * 32]),
            presence.leave(gate.namespace, gate.context.clock, "0" * 32),
            open_topic(gate.namespace, gate.context.clock, "new", calls.policy),
            stored_policy(gate.namespace, gate.context.clock, "t"),
            calls.trigger(Trigger("new", 1)),
            calls.trigger(Trigger("x", 1, delay=0)),
            calls.extend(0, [kept]),
            calls.settle(0, [Settlement("nack", kept)]),
            calls.settle(0, [Settlement("bury", kept)]),
            calls.take(0, 5),
            calls.settle_and_take(0, [Settlement("ack", kept)], 5),
            calls.forward(0, Forward("list", None, 0), 10),
            calls.forward(0, Forward("stream", f"theirs-{gate.namespace}".encode(), 0), 10),
            calls.cancel("x"),
            calls.bury("y", None, "why"),
            calls.reschedule(Trigger("y", delay=0)),
            calls.flush("z"),
            calls.flush_slot(0),
            calls.peek("x"),
            calls.count_refused("refused_payload", True),
            calls.versions("x"),
            calls.reset_version("x"),
            results.cancel("k"),
            results.result(Ticket("t", b"k", b"k", 1, 1, 0)),
            calls.dead(0, DeadFilter(), 10),
            calls.take_dead(0, "redrive", []),
            *calls.load_dead([calls.check_stored(letter.stored)]).calls,
            *calls.adopt_letters("other", [letter.stored]).calls,
            calls.messages(0, Position(), 10),
            calls.take_dead(0, "delete", []),
            *calls.pause().calls,
            *calls.stats().calls,
            registry.list_entries(gate.namespace, gate.context.clock),
            read_slot(Slot(gate.namespace, "t", 0, 1), gate.context.clock, 1000, 100_000),
            look(f"theirs-{gate.namespace}".encode(), gate.context.clock),
            entries.take(1),
            group.renew([b"1-0"]),
            group.build_leave("me"),
            group.build_release(PendingEntry("stream", b"1-0", [], 1), 5, undo=True),
            entries.renew([entry]),
            entries.remove([entry.id]),
            entries.retry(entry, 1000, undo=False),
            entries.bury(entry, b"letter"),
            resizing._begin(calls, 4),
            resizing._end(old, begun.change, "given up", b"", b""),
            resizing._close(calls, 0, b"change"),
            resizing._unload(old, 0, begun.change, shown.number),
            resizing._load(new, 0, begun.change, 0, shown.number, shown.entries),
            resizing._list_replies(old, 0, 0, b"0"),
            resizing._purge(old, 0, begun.change, True),
            new.reopen(0, begun.change),
            members.heartbeat(gate.namespace, "g", gate.context.clock, said, 1000),
            members.leave(gate.namespace, "g", gate.context.clock, "m"),
            members.list_members(gate.namespace, "g", gate.context.clock),
        ]


def dumped(raw: Any, namespace: str) -> dict[bytes, tuple[bytes, int]]:
    """What is in the keys, and how long that is to stay, 0 = for ever; what would go at all, long enough for a test."""
    return {key: (raw.dump(key), 0 if raw.pttl(key) == -1 else 600_000) for key in raw.keys(f"*{namespace}*")}


def restored(raw: Any, namespace: str, before: dict[bytes, tuple[bytes, int]]) -> None:
    if gone := raw.keys(f"*{namespace}*"):
        raw.delete(*gone)
    for key, (value, stays_ms) in before.items():
        raw.restore(key, stays_ms, value)


def stored(raw: Any, namespace: str) -> dict[bytes, Any]:
    """What is in the keys; how the server holds it may differ."""
    read = {
        b"string": raw.get, b"hash": raw.hgetall, b"list": lambda key: raw.lrange(key, 0, -1),
        b"zset": lambda key: raw.zrange(key, 0, -1, withscores=True), b"stream": raw.xrange,
    }  # fmt: skip
    return {key: read[raw.type(key)](key) for key in raw.keys(f"*{namespace}*")}


def allowed(role: str, call: Call[Any], namespace: str) -> bool:
    """Whether the rule has all the keys and commands of the call."""
    known = patterns(namespace)
    prefixes = tuple(known[name].removesuffix("*").encode() for name in ROLES[role].keys)
    words = {word[1:].upper() for word in rule([role], namespace, "u") if word.startswith("+")}
    return all(key.startswith(prefixes) for key in call.keys) and commands(call.script.name) <= words


def refusal(gate: Gate, call: Call[Any]) -> str:
    """What the store says against it, if it does."""
    try:
        gate.context.link.run(call)
    except ServerRejected as error:
        return str(error)
    return ""


FOREIGN_KEYS = {
    "subscribers/expiry/ttl",
    "subscribers/lists/renew",
    "subscribers/lists/settle",
    "subscribers/lists/take",
    "subscribers/streams/leave",
    "subscribers/streams/release",
    "subscribers/streams/renew",
}
"""Calls on keys of the user's own. No role has them unless the rule names them."""


@pytest.mark.damages("changing")
@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_may_not_do_changes_nothing(
    role: str,
    gate: Gate,
    users: Callable[..., str],
    raw: Any,
    namespace: str,
    clock: Clock,
    record_fault: Callable[..., None],
) -> None:
    # Given something everywhere, and a user of one role
    scene = Scene(gate)
    before, saved = stored(raw, namespace), dumped(raw, namespace)
    outcomes: dict[str, set[str]] = {}
    n = 0
    with Gate(users(role), namespace=namespace, clock=clock, timeout="30s") as theirs:
        for call in scene.calls:
            # When it makes any call that there is
            refused = refusal(theirs, call)
            outcomes.setdefault(call.script.name, set()).add("refused" if refused else "done")
            # Then what is refused says so, and has changed nothing
            if refused:
                n += 1
                assert refused.startswith("this user's access list does not allow it: "), call.script.name
                assert stored(raw, namespace) == before, call.script.name
            restored(raw, namespace, saved)
            # And what the rule has in all its parts is not refused
            assert not allowed(role, call, namespace) or "done" in outcomes[call.script.name], call.script.name
    # And its own scripts were among what is done, whatever they were asked
    own = set(ROLES[role].scripts) - FOREIGN_KEYS
    assert {name for name, found in outcomes.items() if "done" in found} >= own
    assert set(outcomes) == set(names())
    record_fault("call of each script by a user whose access list lacks it", n, exhaustive=True, written=0)


REFUSED = [
    ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "requirepass"), ("SCRIPT", "FLUSH"), ("SCRIPT", "LOAD", "return 1"),
    ("ACL", "LIST"), ("CLIENT", "KILL", "TYPE", "normal"), ("MONITOR",), ("GET", "theirs"), ("SET", "theirs", "x"),
    ("DEL", "theirs"), ("EVAL", "return redis.call('GET', 'theirs')", "0"), ("EVAL", "return 1", "1", "theirs"),
    ("PUBLISH", "theirs", "x"), ("FUNCTION", "LIST"), ("SLAVEOF", "127.0.0.1", "1"), ("SHUTDOWN", "NOSAVE"),
]  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_more_than_its_keys_and_commands(role: str, users: Callable[..., str], raw: Any) -> None:
    with redis.Redis.from_url(users(role)) as theirs:
        for words in REFUSED:
            with pytest.raises(redis.exceptions.ResponseError, match=r"permission|unknown command|can't (run|access)"):
                theirs.execute_command(*words)


def test_a_user_of_one_namespace_does_not_reach_another(users: Callable[..., str], namespace: str) -> None:
    # Given a user of everything in a namespace whose name begins as another's does
    with Gate(users("admin"), namespace=f"{namespace}0", timeout="30s") as theirs:
        for act in (lambda: theirs.first("k", "1h"), lambda: theirs.topic("t").trigger("k")):
            with pytest.raises(ServerRejected, match="this user's access list"):
                act()


async def test_a_hint_that_may_not_be_published_undoes_nothing(
    faces: Callable[..., Any], raw: Any, namespace: str, gate: Gate
) -> None:
    # Given users without channels, which is the default of Redis 7
    face = faces("producer", "guard", "worker")
    raw.execute_command("ACL", "SETUSER", f"{namespace}-producer-guard-worker", "resetchannels")
    topic = face.topic("t", window="1s", concurrency=1)
    # When they do what wakes others, Then it is done as if there were nobody to wake
    assert (await topic.trigger("k", 1)).status == "scheduled"
    assert (await topic.stats())["accepted"] == 1
    assert await topic.flush("k")
    assert await topic.ack((await topic.take(1))[0])
    claim = await face.claim("k")
    gate.context.link.run(claims_of(gate).claim(claims_of(gate).key("claim", "k"), new_id(), 1000, 1000, wait=True))
    assert await claim.complete("done")
    assert (await face.inspect("k")).state == "done"


async def test_a_refusal_names_the_script_and_the_fix(faces: Callable[..., Any]) -> None:
    face = faces("viewer")
    with pytest.raises(ServerRejected, match=r"this user's access list .* `idemgate acl`") as told:
        await face.first("k", "1h")
    assert "guard/mark" in str(told.value) or "script: on @user_script" in str(told.value)  # Valkey names no script


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_a_server_takes(raw: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["guard"], ["producer", "--cluster"], ["worker", "--durable", "--keys", "orders:*", "--keys", "x"],
        ["subscriber", "--channels", "prices.*"], ["viewer", "--user", "eye"], ["admin", "guard", "-n", "shop"],
    ):  # fmt: skip
        assert main(["acl", *words]) == 0
        line = capsys.readouterr().out.strip().split(" ")
        assert raw.execute_command(*line) in (True, b"OK")
        assert raw.execute_command("ACL", "DELUSER", line[2]) == 1


def test_a_user_keeps_its_password_and_loses_its_other_rights(users: Callable[..., str], raw: Any) -> None:
    # Given a user of a role, that got more rights by hand
    url = users("viewer", tenant="shop")
    raw.execute_command("ACL", "SETUSER", "shop-viewer", "+flushall", "~*")
    # When the rule is sent again
    users("viewer", tenant="shop")
    # Then it may still log in, and do no more than its role
    with redis.Redis.from_url(url) as theirs:
        assert theirs.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            theirs.flushall()


def test_a_new_user_cannot_log_in(raw: Any) -> None:
    raw.execute_command(*rule(["viewer"], "shop", "shop-new"))
    with pytest.raises(redis.exceptions.AuthenticationError):
        raw.execute_command("AUTH", "shop-new", "")
    raw.execute_command("ACL", "DELUSER", "shop-new")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["guard", "--namespace", "a b"], "not a name"),
        (["guard", "--user", "x +@all"], "not a name"),
        (["worker", "--keys", "x* +@all"], "keys='x* +@all': not a pattern"),
        (["worker", "--channels", ""], "channels='': not a pattern"),
    ],
)
def test_what_no_rule_can_hold_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acl", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no such role"):
        rule(["king"], "shop", "shop-king")


def test_every_script_has_a_role() -> None:
    given = {name for role, found in ROLES.items() if role != "admin" for name in found.scripts}
    assert given == set(names())


RUN_BY = {
    "once": "guard/claim guard/complete guard/release guard/renew guard/mark",
    "claim": "guard/claim guard/complete guard/release guard/renew guard/checkpoint guard/cancel",
    "first": "guard/mark guard/mark_many", "dedup": "dedup/add dedup/get dedup/get_or_set",
    "inspect": "guard/inspect", "forget": "guard/inspect guard/forget", "resolve": "guard/inspect guard/resolve",
    "trigger": "topics/open topics/policy topics/trigger topics/count_refused topics/reshard/reopen",
    "result": "topics/results",
    "cancel": "topics/cancel", "reschedule": "topics/reschedule", "flush": "topics/flush", "peek": "topics/peek",
    "versions": "topics/versions/read", "reset_version": "topics/versions/reset",
    "stats": "topics/stats", "pause": "topics/pause", "resume": "topics/pause", "take": "topics/take",
    "ack": "topics/settle", "nack": "topics/settle", "bury": "topics/settle topics/settle_and_take",
    "extend": "topics/extend", "forward": "topics/forward",
    "dead.redrive": "topics/take_dead", "dead.delete": "topics/take_dead",
    "stored_topics": "topics/registry topics/stats", "dead.list": "topics/dead",
    "status": "topics/registry topics/stats topics/dead topics/peek topics/versions/read guard/inspect presence/list "
    "presence/read",
    "metrics": "topics/registry topics/stats topics/dead topics/peek topics/versions/read guard/inspect presence/list "
    "presence/read",
}  # fmt: skip
"""The scripts of each verb in the table of roles."""


@pytest.mark.parametrize("role", ["guard", "producer", "worker", "viewer"])
def test_a_role_has_the_commands_of_each_verb_that_the_page_grants(role: str) -> None:
    # Given the table of the page
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    [granted] = re.findall(rf"^\| `{role}` \| ([^|]+) \|", page, re.MULTILINE)
    verbs = re.findall(r"`([a-z_.]+)`", granted)
    assert len(verbs) >= 5
    # Then the user of the role may send each command of their scripts
    words = {word[1:].upper() for word in rule([role], "shop", "u", since_7_2=True) if word.startswith("+")}
    lacking = {(verb, name): commands(name) - words for verb in verbs for name in RUN_BY[verb].split()}
    assert not any(lacking.values()), lacking


def test_what_is_asked_beside_scripts_is_given_where_it_was_asked_for() -> None:
    def words(**options: bool) -> set[str]:
        return {*rule(["guard"], "shop", "shop-guard", **options)}

    plain = words()
    assert {"+eval", "+evalsha", "+ping", "+select", "+client|setname", "+subscribe"} <= plain
    assert words(cluster=True) - plain == {"+asking", "+cluster|slots"}
    assert words(durable=True) - plain == {"+wait", "~ig2:{shop:durability}"}
    assert words(since_7_2=True) - plain == {"clearselectors", "+client|setinfo", "+pexpiretime"}
    assert words(durable=True, since_7_2=True) - words(since_7_2=True) - words(durable=True) == {"+waitaof"}


def test_who_looks_at_servers_is_given_what_a_cluster_says_of_itself() -> None:
    for role in ROLES:
        words = [{*rule([role], "shop", "u", cluster=cluster)} for cluster in (False, True)]
        assert ("+cluster|info" in words[1]) is ("+info" in words[0])
        assert "+cluster|info" not in words[0]


def test_who_only_looks_hears_nothing() -> None:
    heard = {role: [word for word in rule([role], "shop", "u") if word.startswith("&")] for role in ROLES}
    assert {role for role, channels in heard.items() if not channels} == {"viewer", "auditor", "subscriber"}
