"""Every script does what its header says, and gets what its header asks for."""

from __future__ import annotations

from typing import Any, cast

import redis

from idemgate import lua
from idemgate.audit.slot import Slot, read_slot
from idemgate.core import keys
from idemgate.core.calls import Batch, Call
from idemgate.core.codec import Codec
from idemgate.dedup.dedup import DedupCalls
from idemgate.gate import Gate
from idemgate.guard.claim_calls import Claims, Record, register_retention
from idemgate.guard.heartbeat import note_history
from idemgate.history.calls import read_history
from idemgate.membership import heartbeats as members
from idemgate.operate.acts import acts_call, record_call
from idemgate.operate.keys import scopes_call
from idemgate.presence import calls as presence
from idemgate.subscribers.expiry.rules import look
from idemgate.subscribers.list_entries import ListCalls, TakenEntry
from idemgate.subscribers.stream_group import Group, PendingEntry
from idemgate.topics import registry
from idemgate.topics import reshard as resizing
from idemgate.topics.dead_letters import DeadFilter, DeadPosition
from idemgate.topics.deliveries import Settlement
from idemgate.topics.merge import pack
from idemgate.topics.messages import Delivery, Forward, Message, Position, Ticket, Trigger
from idemgate.topics.partial import FailedItems
from idemgate.topics.slots import open_topic, stored_policy
from idemgate.topics.topic_calls import TopicCalls
from tests.for_each import for_each
from tests.messages import pack_message
from tests.scripts.contracts import expanded, header_of, violations

SOURCES = {name: lua.source(name) for name in [*lua.names(), *lua.libraries()]}


def test_headers_say_what_scripts_do() -> None:
    assert violations(SOURCES) == []


def test_this_reader_expands_as_the_other() -> None:
    for name in lua.names():
        files = [SOURCES[one] for one in expanded(name, SOURCES)]
        lines = [line for text in files for line in text.splitlines() if "@include" not in line]
        assert sorted(line for line in lua.expand(name).splitlines() if line) == sorted(filter(None, lines))


@for_each("name", lua.names())
def test_a_script_compiles_on_the_server(name: str, raw: redis.Redis) -> None:
    assert raw.script_load(lua.script(name).text.decode()) == lua.script(name).sha.decode()


# -- the checks can fail ----------------------------------------------------------------------------------------------

SAMPLE = {
    "lib/now": """
local function digits(n)
  return string.format("%.0f", n)
end

local function now(given)
  local t = given == "" and redis.call("TIME")
  return t and t[1] * 1000000 + t[2] or tonumber(given)
end
""",
    "lib/slot": """
local function slot(keys)
  return { messages = keys[1], log = keys[2] }
end
""",
    "lib/log": """
--- Keys: log
--- @include "lib/now"
local function remember(log, now_us)
  redis.call("HSET", log, "at", digits(now_us))
  redis.call("PEXPIRE", log, 60000)
  redis.pcall("PUBLISH", log, "1")
end

local function recall(log)
  return redis.call("HGET", log, "at")
end
""",
    "lib/end_one": """
--- Makes a part of the reply.
local function end_one(K, key, verb)
  if verb == "keep" then
    return "kept"
  end
  redis.call("HDEL", K.messages, key)
  return "ok"
end
""",
    "guard/renew": """
--- Renew one. Idempotent.
--- KEYS[1] record
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] owner
--- ARGV[3] lease, ms
--- Returns {"ok", now ms} {"lost", now ms}
--- @include "lib/now"
local now_ms = math.floor(now(ARGV[1]) / 1000)
if redis.call("HGET", KEYS[1], "owner") ~= ARGV[2] then
  return { "lost", now_ms }
end
redis.call("PEXPIRE", KEYS[1], ARGV[3])
return { "ok", now_ms }
""",
    "guard/claim": """
--- Claim several.
--- KEYS[1..] records
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2..] owner, one a record
--- Returns packed "s", one a record
--- @include "lib/now"
local now_us, answers, i = now(ARGV[1]), {}, 0
repeat
  i = i + 1
  redis.call("HSET", KEYS[i], "owner", ARGV[i + 1], "at", digits(now_us))
  answers[i] = "s"
  local answer = "s"
until i == #KEYS
return answers
""",
    "topics/peek": """
--- Look at a message. Writes nothing.
--- KEYS[1..2] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2] key of the message
--- Returns {"ok", now ms, message}
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/log"
local K, now_ms = slot(KEYS), math.floor(now(ARGV[1]) / 1000)
local key = ARGV[2]
return { "ok", now_ms, redis.call("HGET", K.messages, key), recall(K.log) }
""",
    "topics/settle": """
--- End several deliveries.
--- KEYS[1..2] slot
--- KEYS[3] target, a list
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2..] two a delivery: key; verb
--- Returns {"ok", now ms}, then one a delivery, then "ok" | "kept"
--- @include "lib/now"
--- @include "lib/slot"
--- @include "lib/log"
--- @include "lib/end_one"
local K, target = slot(KEYS), KEYS[3]
local now_us = now(ARGV[1])
local now_ms = math.floor(now_us / 1000)
local reply = { "ok", now_ms }
for i = 2, #ARGV, 2 do
  local ended = end_one(K, ARGV[i], ARGV[i + 1])
  reply[#reply + 1] = ended
end
redis.call("RPUSH", target, "1")
remember(K.log, now_us)
return reply
""",
    "topics/trigger": """
--- Accept several.
--- KEYS[1..2] slot
--- ARGV[1] now, us, or "" for the server's
--- ARGV[2..] two a trigger: key; payload. All keys come first
--- Returns {"ok", now ms}
--- @include "lib/now"
--- @include "lib/slot"
local K, now_ms = slot(KEYS), math.floor(now(ARGV[1]) / 1000)
local given = (#ARGV - 1) / 2
local names, payloads = { unpack(ARGV, 2, 1 + given) }, { unpack(ARGV, 2 + given) }
redis.call("HSET", K.messages, names[1], payloads[1])
return { "ok", now_ms }
""",
}
SAMPLE = {name: text.removeprefix("\n") for name, text in SAMPLE.items()}
PLANTED: dict[str, tuple[str, str, str, str]] = {
    "an argument nobody declared": ("guard/renew", "ARGV[3])", "ARGV[4])", "uses ARGV [1, 2, 4]"),
    "no fault, a comment": ("guard/renew", "ARGV[3])", "ARGV[3]) -- ARGV[4]", ""),
    "an argument that is gone": ("guard/renew", "ARGV[3])", "1000)", "its header says [1, 2, 3]"),
    "a key nobody declared": ("guard/renew", '"PEXPIRE", KEYS[1]', '"PEXPIRE", KEYS[2]', "uses KEYS [1, 2], its"),
    "a key out of turn": ("guard/claim", "KEYS[i]", "KEYS[i + 1]", "in a way that cannot be checked"),
    "keys that are not gone through": ("guard/claim", "KEYS[i]", "KEYS[1]", "takes all of KEYS, or says so"),
    "an argument of each that nobody reads": ("guard/claim", "ARGV[i + 1]", '"0"', "reads no ARGV behind"),
    "arguments of each that nobody declared": ("guard/renew", "ARGV[3])", "ARGV[KEYS and 3])", "reads ARGV behind"),
    "a key too many": ("topics/peek", "KEYS[1..2]", "KEYS[1..3]", "its header says [1, 2, 3]"),
    "a key beside the slot that nobody declared": (
        "topics/settle", "--- KEYS[3] target, a list\n", "", "uses KEYS [1, 2, 3], its header says"),
    "a key beside the slot by another name": (
        "topics/settle", '"RPUSH", target', '"RPUSH", given', 'gives "RPUSH" the key given'),
    "keys passed on": ("topics/peek", "slot(KEYS)", "slot({ unpack(KEYS) })", "in a way that cannot be checked"),
    "another stride": ("topics/settle", "for i = 2, #ARGV, 2 do", "for i = 2, #ARGV, 3 do", "its header says [(2, 2)]"),
    "a column too few": ("topics/trigger", ", { unpack(ARGV, 2 + given) }", "", "its header says [(2, 2)]"),
    "another start": ("topics/settle", "for i = 2, #ARGV, 2 do", "for i = 3, #ARGV, 2 do", "its header says [(2, 2)]"),
    "a place nobody reads": ("topics/settle", "ARGV[i + 1]", '""', "its header says [(2, 2)]"),
    "a place too few in the header": ("topics/settle", "two a delivery: key; verb", "two a delivery: key", "[(2, 0)]"),
    "another start of the rest": (
        "topics/trigger", "{ unpack(ARGV, 2, 1 + given) }", "{ unpack(ARGV, 3) }", "its header says [(2, 2)]"),
    "a word nobody declared": (
        "guard/renew", '{ "lost", now_ms }', '{ "gone", now_ms }', "answers ['gone', 'ok'], its header"),
    "a word nobody says": ("guard/renew", '{"lost", now ms}', '{"lost", now ms} {"late", now ms}', "its header says"),
    "a word for each nobody declared": ("lib/end_one", 'return "kept"', 'return "stopped"', "for each"),
    "a word for each nobody says": ("topics/settle", '"ok" | "kept"', '"ok" | "kept" | "late"', "for each"),
    "a packed word nobody says": ("guard/claim", 'packed "s"', 'packed "t"', "packed"),
    "an include of nothing": ("topics/settle", '"lib/now"', '"lib/then"', "lib/then, which does not exist"),
    "an include twice": (
        "guard/renew", '--- @include "lib/now"', '--- @include "lib/now"\n--- @include "lib/now"', "twice"),
    "an include for nothing": (
        "guard/renew", '--- @include "lib/now"', '--- @include "lib/now"\n--- @include "lib/slot"', "does not use"),
    "an include that is missing": (
        "lib/log", '--- @include "lib/now"\n', "", "uses digits and does not include"),
    "a cycle": (
        "lib/now", "local function digits", '--- @include "lib/log"\nlocal function digits', "a cycle with lib/log"),
    "a library of nothing": ("lib/slot", "local function slot", "function slot", "defines nothing"),
    "a library that reads arguments": ("lib/log", '"HGET", log', '"HGET", ARGV[1]', "reads KEYS or ARGV"),
    "a command of Redis 7": ("lib/log", '"PEXPIRE", log', '"HPEXPIRE", log', 'calls "HPEXPIRE"'),
    "an option of Redis 7": ("lib/log", "log, 60000", 'log, 60000, "GT"', "option of EXPIRE"),
    "a hint that may be refused": ("lib/log", "redis.pcall", "redis.call", "hint may not be published"),
    "a key that is made up": ("lib/log", '"PEXPIRE", log', '"PEXPIRE", "ig2:" .. log', "which is not one of KEYS"),
    "a key that is not declared": ("lib/log", "--- Keys: log\n", "", "the key log, which is not one of KEYS"),
    "a user's key as a key": ("topics/peek", "K.messages, key", "key, key", 'gives "HGET" the key key'),
    "a write of a reader": (
        "topics/peek", 'return { "ok"', 'redis.call("DEL", K.log)\nreturn { "ok"', "writes nothing"),
    "a write that a reader calls": (
        "topics/peek", "recall(K.log)", "remember(K.log, 1)", "writes nothing, and calls HSET"),
    "the time twice": (
        "guard/renew", "local now_ms", "local later = now(ARGV[1])\nlocal now_ms", "does not ask for the time once"),
    "the server's time beside": (
        "guard/renew", "local now_ms", 'local t = redis.call("TIME")\nlocal now_ms', "TIME more or less"),
    "another first argument": ("guard/renew", "now, us, or", "now, ms, or", "than the time"),
    "a large number in a text": ("topics/settle", '"1")', '"x" .. now_us)', "use digits()"),
    "a name that is not defined": ("lib/end_one", "K.messages, key", "K.messages, kex", "kex is not defined"),
    "a name that is defined twice": ("topics/settle", "local reply", "local digits, reply", "digits is defined twice"),
    "no sentence": ("guard/renew", "--- Renew one. Idempotent.\n", "", "no sentence"),
}  # fmt: skip


def test_the_sample_has_no_fault() -> None:
    assert violations(SAMPLE) == []


@for_each("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    name, before, after, told = PLANTED[fault]
    assert before in SAMPLE[name]
    found = violations(SAMPLE | {name: SAMPLE[name].replace(before, after, 1)})
    assert [line for line in found if told in line] if told else found == []


# -- Python sends what the headers ask for ----------------------------------------------------------------------------


def _delivery(gate: Gate, slot: int = 0) -> Delivery[Any]:
    policy = gate.topic("t").policy
    return Delivery("t", slot, b"k", 7, 1, Message(pack_message(), policy.merge, gate.context.codec))


def _plans(topic: TopicCalls) -> list[Batch[Any]]:
    """What a change of slots sends, and forgetting."""
    entry = resizing._Entry(b"p", b"k", b"1", b"", b"", b"k")
    calls: list[Call[Any]] = [
        resizing._begin(topic, 8),
        resizing._end(topic, b"change", "done", b"", b""),
        resizing._close(topic, 0, b"change"),
        resizing._unload(topic, 0, b"change", 0),
        *(resizing._load(topic, 0, b"change", 1, 1, [entry] * n) for n in (0, 1, 3)),
        resizing._list_replies(topic, 0, 1, b"0"),
        resizing._purge(topic, 0, b"change", True),
    ]
    return [Batch(calls, list)]


def _calls() -> list[Call[Any]]:
    """Every call there is, those with repeated arguments with none, one and three of them."""
    claims, gate = Claims("ns", None), Gate("redis://nowhere")
    dedup = DedupCalls("ns", None, "s", 1_000)
    record, owner = claims.key("s", "k"), b"o"
    policy = gate.topic("t", window="1s").policy
    topic = TopicCalls("ns", "t", policy, Codec(1000), None)
    results = TopicCalls("ns", "r", gate.topic("r", result_retention="1m").policy, Codec(1000), None)
    one, settled = _delivery(gate), Settlement("ack", _delivery(gate))
    said = members.HeartbeatRequest("m", 1, ("t", "u"), 0, (), (), ())
    said_much = members.HeartbeatRequest("m", 1, (), 0, (("t", 1),), (("t", 2), ("t", 3)), (("t", 4),))
    many: list[Batch[Any]] = [
        topic.trigger_many(
            [Trigger("a"), Trigger("b", 1, version=3, event_id="e"), Trigger("c", delay="1s", group="g")]
        ),
        topic.settle_many([settled, Settlement("nack", one, 5, "why"), Settlement("bury", one)]),
        topic.settle_many([Settlement("nack", one, 5, "why", FailedItems([1, 0, b"\xa1x"], 1, 2))]),
        topic.extend_many([one, one, one]),
        *_plans(topic),
        topic.pause(),
        topic.stats(),
        results.settle_many([settled, Settlement("ack", one, result=b"v"), Settlement("nack", one)]),
        dedup.add_many(range(100)),
        dedup.get_or_set_many([(n, n) for n in range(100)]),
    ]
    jobs = ListCalls("jobs", "me", None, lease_ms=1, pop="left", max_dead_letters=1)
    entry = TakenEntry("jobs", b"1", b"1 me", b"x")
    group: Any = Group(cast(Any, None), "stream", "group", "me", 1)
    seen = Record("done", 1, 1, 0, None, 1.0, 0.0, "", False, "v", b"", b"")
    return [
        claims.claim(record, owner, 1, 1),
        claims.claim(record, owner, 1, 1, b"print", 3, hold=True, wait=True),
        claims.mark(record, owner, 1, b"print"),
        claims.mark_many(record, 1, 100)[0],
        claims.first(record, 1),
        dedup.add("k"),
        dedup.get_or_set("k", 7),
        dedup.get("k"),
        claims.complete(record, owner, 1, 1, b"v", b"x"),
        claims.renew(record, owner, 1, 1),
        claims.release(record, owner, 1, undo=True),
        claims.release(record, owner, 1, failure=b"x"),
        claims.checkpoint(record, owner, b"x"),
        claims.cancel(record, 1),
        claims.inspect(record),
        claims.forget(record, b"request", seen, force=True),
        claims.resolve(record, b"request", seen, True, 1, b"v", b"x"),
        register_retention(Gate("redis://nowhere", namespace="ns").context, "s", 1),
        record_call(gate, "who", "what", "why"),
        acts_call(gate, 5),
        scopes_call(gate),
        read_history(b"history", None, b"k"),
        note_history(Gate("redis://nowhere", namespace="ns").context, b"history", [(0, b"note")]),
        presence.beat("ns", None, "0" * 32, b"report"),
        presence.beat("ns", None, "0" * 32, b"report", named=True),
        presence.list_ids("ns", None),
        presence.list_names("ns", None),
        presence.read_reports("ns", None, ["0" * 32]),
        presence.leave("ns", None, "0" * 32),
        open_topic("ns", None, "t", policy),
        stored_policy("ns", None, "t"),
        registry.list_entries("ns", None),
        look(b"theirs", None),
        topic.reopen(0, b"change"),
        topic.trigger(Trigger("a")),
        topic.take(0, 5),
        topic.settle_and_take(0, [settled], 5),
        topic.settle_and_take(0, [settled, Settlement("nack", one, 5, "why"), Settlement("bury", one)], 5),
        topic.settle(0, []),
        topic.settle(0, [settled]),
        topic.extend(0, []),
        topic.extend(0, [one]),
        topic.forward(0, Forward("list", None, 0), 10),
        topic.forward(0, Forward("stream", b"named", 5), 10),
        topic.cancel("k"),
        topic.cancel("k", group="g"),
        topic.bury("k", "g", "why"),
        topic.reschedule(Trigger("k", delay="1s")),
        topic.flush("k"),
        topic.flush_slot(0),
        topic.peek("k"),
        topic.count_refused("refused_payload", True),
        topic.versions("k"),
        topic.reset_version("k"),
        topic.dead(0, DeadFilter(), 10),
        topic.dead(0, DeadFilter("k*", "no", 5), 10, DeadPosition(7, "8")),
        topic.take_dead(0, "redrive", []),
        *topic.load_dead([(b"k", b"letter"), (b"l", b"letter")]).calls,
        *topic.adopt_letters("other", [pack([b"k", pack_message(b"x"), b"no", 5, number]) for number in (1, 2)]).calls,
        topic.messages(0, Position(), 10),
        topic.messages(0, Position(4, 5.0, b"k"), 10),
        results.result(Ticket("t", b"k", b"k", 1, 1, 0)),
        results.cancel("k"),
        results.take(0, 1),
        results.settle_and_take(0, [settled], 1),
        read_slot(Slot("ns", "t", 0, 1), None, 1, 1),
        topic.take_dead(0, "delete", ["1", "2", "3"]),
        jobs.take(5),
        *(jobs.renew([entry] * n) for n in (0, 1, 3)),
        *(jobs.remove([b"1"] * n) for n in (0, 1, 3)),
        jobs.retry(entry, 5, undo=True),
        jobs.bury(entry, b"letter"),
        *(group.renew([b"1-0"] * n) for n in (0, 1, 3)),
        group.build_leave("me"),
        group.build_release(PendingEntry("s", b"1-0", [], 1), 5, undo=True),
        members.heartbeat("ns", "g", None, said, 1000),
        members.heartbeat("ns", "g", None, said_much, 1000),
        members.leave("ns", "g", None, "m"),
        members.list_members("ns", "g", None),
        *claims.claim_each([(b"k%d" % n, owner) for n in range(3)], 1, 1, 0, False, True, 2),
        *claims.complete_each([(b"k%d" % n, owner, 1, 1, b"x") for n in range(3)], 2),
        *claims.release_each([(b"k%d" % n, owner, 1, b"") for n in range(3)], 2, undo=True),
        *(call for batch in many for call in batch.calls),
    ]


def test_python_sends_as_many_keys_and_arguments_as_declared() -> None:
    calls = _calls()
    for call in calls:
        header = header_of(SOURCES[call.script.name])
        assert len(call.keys) in (header.required, header.keys) or (header.many and call.keys), call.script.name
        assert header.takes(len(call.args)), f"{call.script.name} does not take {len(call.args)}"
        assert not any(isinstance(arg, float) for arg in call.args), call.script.name
    # And no script was left out
    assert {call.script.name for call in calls} == set(lua.names())


def test_a_count_that_is_off_by_one_would_be_noticed() -> None:
    for name in lua.names():
        header = header_of(SOURCES[name])
        fixed = len(header.args)
        assert not header.takes(fixed - 1 - header.spare)
        assert header.takes(fixed + 1) is (header.tail is not None and header.tail[1] == 1)


def test_the_parts_of_a_slot_are_those_of_the_library() -> None:
    named = SOURCES["topics/lib/slot/slot"].partition("return {")[2]
    for number, part in enumerate(keys.PARTS, 1):
        name = part.replace(":", "_")
        wanted = f"[{part[-1]}] = keys[{number}]" if name.startswith("replies") else f"{name} = keys[{number}]"
        assert wanted in named
