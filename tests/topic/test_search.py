"""No interleaving of a small scope breaks a promise, and the search finds each fault that is put into the scripts.

`IDEMGATE_DEPTH=11 poe pytest tests/topic/test_search.py -s` looks further.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from idemgate import Gate
from idemgate.lua import script
from tests.topic.search import Search, Violation

DEPTH = int(os.environ.get("IDEMGATE_DEPTH", "5"))
SCOPES = {"one key": ("k", "k"), "one group": ("k", "l")}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scope", SCOPES)
def test_no_interleaving_breaks_a_promise(raw: Any, gate: Gate, scope: str, record_fault: Any) -> None:
    states = Search(raw, gate, SCOPES[scope], {}).run(DEPTH)
    print(f"{scope}: {states:,} states within {DEPTH} steps")
    assert states > 500
    record_fault(
        "every order of steps of a topic, with late copies (N: states)",
        states,
        promises="P4 P5 P6 P7 P9 P10 P11 P13 P15",
        exhaustive=True,
        steps=f"{DEPTH}",
    )


FAULTS: dict[str, tuple[str, str, str, str]] = {
    "an ending needs no token": (
        "one key", "topic/settle", "if not d or d[1] ~= given[2 * i] then", "if not d then"),
    "a key in flight is scheduled": (
        "one key", "topic/trigger", 'if flying == 0 or redis.call("HEXISTS", K.flight, key) == 0 then', "if true then"),
    "a take is not remembered": ("one key", "topic/take", "if given then", "if false then"),
    "a trigger is not remembered": ("one key", "topic/trigger", "if given then", "if false then"),
    "what is behind is forgotten": ("one key", "topic/settle", "if behind[key] then", "if false then"),
    "what was cancelled is tried again": (
        "one key", "topic/settle", "elseif d[3] == 1 then", "elseif false then"),
    "attempts are not counted": (
        "one key", "topic/take", "packed = attempted(m, packed)", "packed = packed or cmsgpack.pack(m)"),
    "what lapses is lost": (
        "one key", "topic/take", 'add("folded", restore(K, p, key, m, again(key, d, m), "retry"))', ""),
    "tokens do not rise": ("one key", "topic/take", "last = fence(last, now_us)", "last = now_us"),
    "what is cancelled stays scheduled": ("one key", "topic/cancel", "unplace(K, key, m)\n  redis.call", "redis.call"),
    "leases lapse at once": (
        "one key", "topic/take", 'redis.call("ZRANGEBYSCORE", K.lease, "-inf", now_ms,',
        'redis.call("ZRANGEBYSCORE", K.lease, "-inf", "+inf",'),
    "a redriven letter stays": ("one key", "topic/exhume", 'redis.call("HDEL", K.grave, id)', ""),
    "a group is never full": ("one group", "topic/take", "if #inside >= limit then", "if false then"),
    "an ending keeps its group": ("one group", "topic/settle", "vacate(K, one[1], one[2], p.group_limit)", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, fault: str) -> None:
    scope, name, before, after = FAULTS[fault]
    text = script(name).text.decode()
    assert before in text
    with pytest.raises(Violation):
        Search(raw, gate, SCOPES[scope], {name: text.replace(before, after)}).run(9)
