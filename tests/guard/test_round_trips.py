"""What the guard costs, counted on the wire."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from idemgate import current
from tests.waiting import eventually

CHOOSER = (Path(__file__).parents[2] / "docs" / "choose.md").read_text(encoding="utf-8")
Counted = Callable[[Awaitable[Any]], Awaitable[tuple[int, int]]]


@pytest.fixture
async def counted(wired: Any, wire: Any) -> Counted:
    """(scripts, round trips) that something took, on connections that are made and with scripts that are known."""
    claim = await wired.claim("warm")
    await claim.checkpoint(1)
    await claim.extend()
    await claim.complete()
    released = await wired.claim("warm too")
    await released.release()
    await wired.first("warm", "1h")
    await wired.first_many(["warm", "warm too"], "1h")
    dedup = wired.dedup("s", "1h")
    await dedup.add("warm")
    await dedup.get_or_set("warm", 1)
    await dedup.get("warm")
    await wired.inspect("warm")
    await wired.forget("warm")
    await wired.resolve("warm", done=True)

    async def count(work: Awaitable[Any]) -> tuple[int, int]:
        wire.reset()
        await work
        return wire.scripts, wire.trips

    return count


async def sent_at_once(wire: Any, scripts: int, work: Awaitable[Any]) -> Any:
    """Return the answer to work that sends all its scripts, and no more, without waiting for the first reply."""
    wire.reset()
    wire.flowing.clear()
    task = asyncio.ensure_future(work)
    await eventually(lambda: wire.scripts >= scripts)
    wire.flowing.set()
    answer = await task
    assert wire.scripts == scripts
    return answer


async def test_two_for_a_new_key_and_one_for_a_duplicate(wired: Any, counted: Counted) -> None:
    handle = wired.once(key="{k}", scope="s", fingerprint=["k"])(lambda k: k)
    assert await counted(handle("x")) == (2, 2)
    assert await counted(handle("x")) == (1, 1)


async def test_two_for_a_failure_and_one_where_the_failure_is_kept_or_stored(wired: Any, counted: Counted) -> None:
    async def fails(how: str) -> None:
        def body(k: str) -> None:
            raise ValueError(k)

        with pytest.raises(ValueError, match="x"):
            await wired.once(key="{k}", scope=how, on_error=how)(body)("x")

    assert await counted(fails("release")) == (2, 2)
    assert await counted(fails("store")) == (2, 2)
    assert await counted(fails("keep")) == (1, 1)


async def test_one_at_most_once(wired: Any, counted: Counted) -> None:
    handle = wired.once(key="{k}", scope="s", at_most_once=True)(lambda k: k)
    assert await counted(handle("x")) == (1, 1)
    assert await counted(handle("x")) == (1, 1)


async def test_one_for_first(wired: Any, counted: Counted) -> None:
    assert await counted(wired.first("x", "1h")) == (1, 1)
    assert await counted(wired.first("x", "1h")) == (1, 1)


@pytest.mark.usefixtures("counted")
async def test_one_for_a_hundred_of_first_many(wired: Any, wire: Any) -> None:
    assert await sent_at_once(wire, 10, wired.first_many(range(1000), "1h")) == [True] * 1000


async def test_one_for_a_dedup_id_and_one_a_shard_for_many(wired: Any, wire: Any, counted: Counted) -> None:
    dedup = wired.dedup("s", "1h")
    assert await counted(dedup.add("x")) == (1, 1)
    assert await sent_at_once(wire, 32, dedup.add_many(range(1000))) == [True] * 1000


async def test_one_to_claim_a_batch_and_one_to_end_it(wired: Any, wire: Any, counted: Counted) -> None:
    claims = await sent_at_once(wire, 2, wired.claim_many(range(200)))
    assert {claim.state for claim in claims} == {"started"}
    ended = wired.complete_many([(claim, 1) for claim in claims[:150]])
    assert await sent_at_once(wire, 2, ended) == [True] * 150
    assert (await counted(wired.release_many(claims[150:])))[0] == 1


async def test_one_to_set_a_dedup_value_and_one_to_get_it(wired: Any, counted: Counted) -> None:
    dedup = wired.dedup("s", "1h")
    assert await counted(dedup.get_or_set("x", 1)) == (1, 1)
    assert await counted(dedup.get_or_set("x", 2)) == (1, 1)
    assert await counted(dedup.get("x")) == (1, 1)


async def test_none_for_a_remembered_key(wired: Any, counted: Counted) -> None:
    handle = wired.once(key="{k}", scope="s", cache_size=1)(lambda k: k)
    assert await counted(handle("x")) == (2, 2)
    assert await counted(handle("x")) == (0, 0)


async def test_one_for_each_thing_a_claim_does(wired: Any, counted: Counted) -> None:
    assert await counted(wired.claim("other")) == (1, 1)
    claim = await wired.claim("x")
    for act in (lambda: claim.checkpoint(1), claim.extend, claim.complete):
        assert await counted(act()) == (1, 1)
    assert await counted(wired.inspect("x")) == (1, 1)
    # A decision names what it is about, so that a late copy of it cannot meet something else.
    for decide in (wired.forget("x"), wired.resolve("x", done=True, retention="1h"), wired.resolve("x", done=False)):
        assert await counted(decide) == (2, 2)
    assert await counted(wired.resolve("x", done=True)) == (3, 3)  # it reads the retention of the scope


async def test_two_for_a_block_and_one_more_for_a_checkpoint(wired: Any, counted: Counted) -> None:
    async def block(note: bool) -> None:
        async with wired.inside("note" if note else "none"):
            if note:
                await current().aio.checkpoint(1)

    if not wired.awaiting:  # its first awaiting call makes a connection
        await wired.gate.aio.inspect("warm")
    assert await counted(block(False)) == (2, 2)
    assert (await counted(block(True)))[0] == 3


async def test_a_server_that_forgot_its_scripts_costs_one_more_each(wired: Any, counted: Counted, raw: Any) -> None:
    handle = wired.once(key="{k}", scope="s")(lambda k: k)
    raw.script_flush()
    assert await counted(handle("x")) == (4, 4)
    assert await counted(handle("y")) == (2, 2)


async def test_two_for_a_batch_of_a_guard(wired: Any, counted: Counted) -> None:
    guard = wired.guard("orders")
    assert await counted(guard.run_many([(f"k{n}", n) for n in range(50)], lambda n: n)) == (2, 2)
    assert await counted(guard.run_many([(f"k{n}", n) for n in range(50)], lambda n: n)) == (1, 1)


async def test_as_many_for_a_run_of_a_guard_as_for_a_call_of_a_guarded_function(wired: Any, counted: Counted) -> None:
    guard = wired.guard("orders")
    assert await counted(guard.run("k", lambda: 1)) == (2, 2)
    assert await counted(guard.run("k", lambda: 1)) == (1, 1)


async def test_as_many_as_the_page_says_that_helps_to_choose(wired: Any, counted: Counted) -> None:
    # Given each way of the page that needs no other package
    guard, dedup, topic = wired.guard("orders"), wired.dedup("s", "1h"), wired.topic("t", window="1h")
    once = wired.once(key="{k}", scope="once")(lambda k: k)
    callback = wired.gate.callback(key="{k}", scope="callback")(lambda k: k)
    merged = wired.gate.merge(key="{k}", name="m", window="1h")(lambda k: k)
    await topic.trigger("warm", event_id="warm")
    await asyncio.to_thread(merged.trigger, "warm")
    await asyncio.to_thread(callback, "warm")

    async def claimed() -> None:
        claim = await wired.claim("claim")
        if claim.started:
            await claim.complete()

    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "@gate.once": lambda: once("k"),
        "guard.run": lambda: guard.run("k", lambda: 1),
        "gate.callback": lambda: asyncio.to_thread(callback, "k"),
        "gate.claim": claimed,
        "gate.first": lambda: wired.first("k", "1h"),
        "gate.dedup": lambda: dedup.add("k"),
        "event_id=": lambda: topic.trigger("k", event_id="k"),
        "gate.topic": lambda: topic.trigger("k"),
        "gate.merge": lambda: asyncio.to_thread(merged.trigger, "k"),
    }
    # Then a new key and a duplicate take the round trips of its table
    for name, way in ways.items():
        (row,) = re.findall(rf"^\|[^|]*\| \[`{re.escape(name)}`.*", CHOOSER, re.MULTILINE)
        said = re.findall(r"\| (\d), (\d)", row)
        assert [((await counted(way()))[1], (await counted(way()))[1])] == [(int(a), int(b)) for a, b in said], name
