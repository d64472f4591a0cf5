"""The work of a script is bounded by its arguments, or by a number that the slot or the group of workers bounds."""

from __future__ import annotations

import re
from typing import Any

from idemgate import Gate
from idemgate.core.calls import call
from idemgate.lua import libraries, names, source
from idemgate.testing import Clock
from idemgate.topics.messages import Forward

WHOLE = re.compile(
    r'redis\.p?call\("(?P<command>DEL|HGETALL|HKEYS|HVALS|SMEMBERS|SORT|KEYS|LREM|ZREMRANGE\w+|ZRANGEBYSCORE|ZRANGEBYLEX'
    r'|ZREVRANGEBYSCORE|ZREVRANGEBYLEX|ZRANGE|ZREVRANGE|LRANGE)", (?P<arguments>[^\n]*)'
)
LIMIT = re.compile(r'"LIMIT"|"?0"?, "?0"?[,)]|most - 1|- 1\)|- 1, |0, 499|middle, middle|at, at\)')
"""What bounds a range: a limit, or both ends by rank."""

BOUNDED_ELSEWHERE = {
    ("guard/scopes", "HKEYS", "KEYS[1]"): "the most scopes that a namespace stores",
    ("operate/record", "LRANGE", "key"): "16 acts",
    ("presence/beat", "ZREMRANGEBYSCORE", "index"): "processes that were killed within the last minutes",
    ("presence/beat", "ZREMRANGEBYRANK", "KEYS[3]"): "one name beyond a thousand",
    ("topics/reshard/unload", "HGETALL", "K.meta"): "counters of a slot",
    ("topics/reshard/unload", "HKEYS", "hash"): "messages that stand nowhere, of which there should be none",
    ("membership/lib/members", "HGETALL", "K.held"): "slots of the topics that a group of workers serves",
    ("membership/lib/members", "ZRANGEBYSCORE", "K.alive"): "members of a group of workers",
    ("membership/heartbeat", "HGETALL", "K.meta"): "members of a group of workers",
    ("membership/list", "HGETALL", "K.held"): "slots of the topics that a group of workers serves",
    ("membership/list", "ZRANGEBYSCORE", "K.alive"): "members of a group of workers",
    ("topics/reshard/reopen", "HKEYS", "K.meta"): "counters of a slot, and one field for each slot that moved into it",
    ("topics/reshard/unload", "HKEYS", "K.meta"): "counters of a slot",
    ("topics/audit", "HGETALL", "K[part]"): "the maximum of entries and bytes in its arguments",
    ("topics/audit", "HKEYS", "K[part]"): "the maximum of entries in its arguments",
    ("topics/audit", "ZRANGE", "K[part]"): "the maximum of entries in its arguments",
    ("topics/registry", "HGETALL", "KEYS[1]"): "topics of a namespace",
    ("topics/stats", "HGETALL", "K.meta"): "counters of a slot",
    ("topics/lib/slot/read_entries", "ZRANGEBYSCORE", "K.leases"): "deliveries of a take, and leases of one ms",
}


def test_each_script_reads_and_frees_a_bounded_number_of_entries() -> None:
    found = set()
    for name in [*names(), *libraries()]:
        for match in WHOLE.finditer(source(name)):
            if not LIMIT.search(match["arguments"]):
                target = match["arguments"].split(",")[0].split(")")[0].strip()
                found.add((name, match["command"], target))
    assert found == set(BOUNDED_ELSEWHERE)


async def test_stored_replies_are_freed_by_another_thread(face: Any, raw: Any, clock: Clock) -> None:
    # Given replies of a former half minute, of which a busy slot has many
    topic = face.topic("t")
    await topic.trigger("a")
    clock.advance("60s")
    raw.config_resetstat()
    # When the first request of a new one replaces them
    await topic.trigger("b")
    # Then no command frees them while the server waits
    counts = raw.info("commandstats")
    assert ("cmdstat_del" in counts, counts["cmdstat_unlink"]["calls"]) == (False, 1)


def test_a_lowered_maximum_of_a_forward_list_drops_a_bounded_number(gate: Gate, raw: Any) -> None:
    # Given a list of forwarded messages, whose maximum is lowered to ten
    topic, target = gate.topic("t"), "forwarded"
    raw.rpush(target, *["x"] * 5000)
    link, calls = gate.context.link, topic.open()
    lengths = []
    for number in range(6):
        topic.trigger(f"k{number}")
        assert link.run(calls.forward(0, Forward("list", target.encode(), 10), 100)).sent == 1
        lengths.append(raw.llen(target))
    # Then each call drops about a thousand
    assert lengths == [4000, 3000, 2000, 1000, 10, 10]
    raw.delete(target)


def test_a_lowered_maximum_of_dead_list_entries_drops_a_bounded_number(gate: Gate, raw: Any, namespace: str) -> None:
    # Given 3,000 dead entries of a list, whose maximum is lowered to ten
    names = [f"{namespace}:list:{part}" for part in ("leases", "state", "data", "dead")]
    raw.rpush(names[3], *["x"] * 3000)
    lengths = []
    for number in range(5):
        raw.hset(names[1], "id", "1 me")
        args = ("", 10, "id", "1 me", "dead", f"letter {number}")
        reply = gate.context.link.run(call("subscribers/lists/settle", names, args, lambda reply: reply))
        lengths.append((raw.llen(names[3]), reply[2]))
    # Then each call drops about a thousand, and says how many
    assert [n for n, _ in lengths] == [1995, 990, 10, 10, 10]
    assert sum(dropped for _, dropped in lengths) == 2995
    raw.delete(*names)
