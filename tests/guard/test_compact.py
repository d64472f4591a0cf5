"""Compact marks: a seen-set remembers as `first` does, in a tenth of the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, islice
from typing import Any
from uuid import uuid4

import msgpack
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from idemgate import ForeignData, Gate
from idemgate.core import keys
from idemgate.core.calls import Call, call
from idemgate.dedup.calls import SHARDS, SeenSets
from idemgate.testing import Clock

WINDOW = 3_600_000
"""ms. Long, since the server lets a page go by its own clock."""
START = 1_700_000_000.0


async def test_an_id_is_new_once_within_the_window_to_the_millisecond(face: Any, clock: Clock) -> None:
    assert [await face.first("k", "20s", compact=True) for _ in range(3)] == [True, False, False]
    # When the window is all but over, it is still known; and being asked for does not renew it
    clock.advance("19.999s")
    assert not await face.first("k", "20s", compact=True)
    clock.advance("1ms")
    assert await face.first("k", "20s", compact=True)
    assert not await face.first("k", "20s", compact=True)


async def test_many_are_answered_in_order_and_of_equal_ids_the_first_is_first(face: Any) -> None:
    assert await face.first("b", "20s", compact=True)
    assert await face.first_many(["a", "b", "c", "a", 7, "7", b"c"], "20s", compact=True) == [
        True, False, True, False, True, False, False,
    ]  # fmt: skip
    assert await face.first_many(iter(["d", "a"]), "20s", compact=True) == [True, False]
    assert await face.first_many([], "20s", compact=True) == []


async def test_a_batch_of_more_than_a_shard_takes_at_once(face: Any) -> None:
    ids = range(20_000)
    assert await face.first_many(ids, "20s", compact=True) == [True] * 20_000
    assert await face.first_many(ids, "20s", compact=True) == [False] * 20_000


async def test_scopes_namespaces_and_kinds_of_marks_are_sets_of_their_own(face: Any, url: str, namespace: str) -> None:
    assert await face.first("k", "20s", compact=True)
    assert await face.first("k", "20s")
    assert await face.first("k", "20s", scope="other:{x}", compact=True)
    with Gate(url, namespace=f"{namespace}-2") as other:
        assert other.first("k", "20s", compact=True)
    assert (await face.inspect("k", scope="other:{x}")).state == "absent"


async def test_it_answers_as_first_does(face: Any, clock: Clock) -> None:
    # Given a stream of ids with many duplicates over some ten windows
    dice = random.Random(1)
    for _ in range(150):
        clock.advance(dice.randrange(3_000) / 1000)
        ids = [dice.randrange(60) for _ in range(dice.randrange(1, 20))]
        # Then both say the same of each
        assert await face.first_many(ids, "20s", compact=True) == await face.first_many(ids, "20s")


# -- against a model --------------------------------------------------------------------------------------------------


class Shard:
    """One shard of a seen-set, asked by digests, and what it should answer."""

    def __init__(self, gate: Gate, clock: Clock, scope: str) -> None:
        self.gate = gate
        self.clock = clock
        self.keys = keys.seen(gate.claims.namespace, scope, 0)
        self.marks: dict[bytes, list[tuple[int, int]]] = {}
        self.requests = 0

    def request(self, digests: list[bytes], window: int = WINDOW) -> Call[list[bool]]:
        self.requests += 1
        args = (b"%d" % self.clock.microseconds(), window, self.requests.to_bytes(5), *digests)
        return call("guard/see", self.keys, args, lambda reply: [new == 1 for new in reply[2:]])

    def see(self, digests: list[bytes], window: int = WINDOW) -> list[bool]:
        """The answers, which are those of a copy of the request too."""
        request = self.request(digests, window)
        answers = self.gate.link.run(request)
        assert self.gate.link.run(request) == answers
        return answers

    def check(self, digests: list[bytes], window: int) -> None:
        """A mark is known for its own window; one that was made within the caller's window may be."""
        now = self.clock.microseconds() // 1000
        for digest, new in zip(digests, self.see(digests, window), strict=True):
            marks = self.marks.setdefault(digest, [])
            within = [mark for mark in marks if mark[0] + window > now]
            if any(made + kept > now for made, kept in within):
                assert not new
            if not within:
                assert new
            if new:
                marks.append((now, window))


def _digests(numbers: list[int]) -> list[bytes]:
    return [number.to_bytes(8) for number in dict.fromkeys(numbers)]


STEPS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, WINDOW // 50), st.sampled_from([WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW // 2])),
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
        st.sampled_from([WINDOW // 10, WINDOW, WINDOW]),
    ),
    max_size=30,
)


@given(steps=STEPS)
@settings(max_examples=60)
def test_every_history_is_answered_by_the_model(url: str, steps: Any) -> None:
    clock = Clock()
    with Gate(url, namespace=f"model-{uuid4()}", clock=clock) as gate:
        shard = Shard(gate, clock, "s")
        for pause, numbers, window in steps:
            clock.advance(pause / 1000)
            shard.check(_digests(numbers), window)


def test_pages_grow_and_shrink_without_losing_a_mark(gate: Gate, clock: Clock) -> None:
    # Given a rate that rises to thousands a window and falls again
    dice = random.Random(2)
    shard = Shard(gate, clock, "s")
    for many in (5, 50, 400, 400, 400, 100, 10, 2):
        for _ in range(20):
            clock.advance(WINDOW / 10_000)
            fresh = [dice.getrandbits(64).to_bytes(8) for _ in range(many)]
            known = dice.sample(list(shard.marks), min(many, len(shard.marks)))
            shard.check([*fresh, *known], WINDOW)


def test_a_page_that_begins_anew_has_nothing_of_what_stood_in_its_place(gate: Gate, clock: Clock) -> None:
    # Given a page with many buckets, the one after it, and then one in the place of the first, with a single mark
    dice, shard = random.Random(3), Shard(gate, clock, "s")
    many = [dice.getrandbits(64).to_bytes(8) for _ in range(1000)]
    shard.check(many, WINDOW)
    for _ in range(2):
        clock.advance(WINDOW / 1000)
        shard.check([dice.getrandbits(64).to_bytes(8)], WINDOW)
    # Then all that it had are new again
    shard.check(many, WINDOW)


async def test_windows_of_years_are_kept_and_end(face: Any, clock: Clock) -> None:
    # Given marks of the beginning and the middle of a page of ten years, which counts in 74 ms
    assert await face.first("a", "3650d", compact=True)
    clock.advance("1234d")
    assert await face.first("b", "3650d", compact=True)
    # Then they are known for that long, and little longer
    clock.advance("2415d23h59m59s")
    assert not await face.first("a", "3650d", compact=True)
    clock.advance("1s")
    assert await face.first("a", "3650d", compact=True)
    clock.advance("1233d23h59m59s")
    assert not await face.first("b", "3650d", compact=True)
    clock.advance("2s")
    assert await face.first("b", "3650d", compact=True)


async def test_a_clock_that_was_set_back_forgets_nothing(face: Any, clock: Clock) -> None:
    clock.advance("1h")
    assert await face.first("k", "20s", compact=True)
    clock.set(START)
    assert not await face.first("k", "20s", compact=True)
    assert await face.first("other", "20s", compact=True)
    assert not await face.first("other", "20s", compact=True)


# -- copies of a request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["one", "many"])
async def test_a_copy_of_a_request_gets_the_same_answer(gate: Gate, face: Any, clock: Clock, asked: str) -> None:
    # Given a first whose reply was lost, and one for a duplicate
    def request() -> Any:
        if asked == "one":
            return gate.mark("k", "20s", "first", compact=True)
        return gate.marks(["k", "k"], "20s", "first", compact=True)

    def run(what: Any) -> Any:
        return gate.link.run(what) if asked == "one" else gate.link.run_all(what)

    first, second = request(), request()
    yes, no = (True, False) if asked == "one" else ([True, False], [False, False])
    assert run(first) == yes
    assert run(second) == no
    # When copies come, at once and late, after others
    await face.first_many(range(1000), "20s", compact=True)
    for _ in range(2):
        clock.advance("9s")
        assert run(second) == no
        assert run(first) == yes
    # Then they did not renew the mark
    clock.advance("2s")
    assert await face.first("k", "20s", compact=True)


# -- collisions -------------------------------------------------------------------------------------------------------


def test_a_new_id_is_taken_for_a_known_one_as_often_as_is_said(gate: Gate, clock: Clock) -> None:
    # Given digests of 16 random bits instead of 64, so that n / 2^16 is the bound
    dice, bits, tries = random.Random(3), 16, 3000
    shard = Shard(gate, clock, "s")
    wrong = 0
    for _ in range(tries):
        wrong += gate.link.run(shard.request([dice.getrandbits(bits).to_bytes(8)])) == [False]
    # Then of each new id the chance was how many others were marked / 2^16: 69 +- 8 in all
    expected = tries * tries / 2 / 2**bits
    assert expected - 4 * expected**0.5 < wrong < expected + 4 * expected**0.5
    # And marks out of date do not count
    clock.advance(WINDOW / 1000)
    assert shard.see([dice.getrandbits(bits).to_bytes(8)]) == [True]


def test_a_digest_that_overlaps_two_marks_is_not_found(gate: Gate, clock: Clock) -> None:
    # Given a mark whose time and check look like part of a digest
    shard = Shard(gate, clock, "s")
    assert shard.see([bytes(8)]) == [True]
    # Then zeros that span it are another id
    assert shard.see([bytes(7) + b"\1"]) == [True]
    assert shard.see([bytes(6) + b"\1\0"]) == [True]


# -- what is not ours -------------------------------------------------------------------------------------------------

Put = Callable[[Any, bytes], Any]
HEAD = [1, 1_700_000_000_000, 1_700_000_020_000, 20_000, 1]
FOREIGN: dict[str, tuple[Put, str]] = {
    "a list": (lambda raw, key: raw.rpush(key, "1"), "another type than a hash"),
    "a string": (lambda raw, key: raw.set(key, "1"), "another type than a hash"),
    "a set": (lambda raw, key: raw.sadd(key, "1"), "another type than a hash"),
    "a hash": (lambda raw, key: raw.hset(key, mapping={"status": "COMPLETED"}), "another layout"),
    "a hash with a nameless field": (lambda raw, key: raw.hset(key, mapping={"": "x"}), "another layout"),
    "a later layout": (lambda raw, key: raw.hset(key, "", msgpack.packb([2, *HEAD[1:]])), "another layout"),
    "what ends too early": (lambda raw, key: raw.hset(key, "", msgpack.packb(HEAD)[:-3]), "another layout"),
    "other values": (lambda raw, key: raw.hset(key, "", msgpack.packb([1, "a", "b", "c", "d"])), "another layout"),
    "a bucket cut short": (
        lambda raw, key: raw.hset(key, mapping={"": msgpack.packb(HEAD), "0": b"x" * 16}),
        "a bucket of another layout",
    ),
}


@pytest.mark.damages("wrong-type", "undecodable", "no-expiry")
@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("what", FOREIGN)
async def test_foreign_data_is_named_and_left_alone(face: Any, gate: Gate, raw: Any, what: str, page: int) -> None:
    put, says = FOREIGN[what]
    key = gate.mark("x", "20s", "s", compact=True).keys[page]
    put(raw, key)
    before = raw.dump(key)
    for ask in (
        face.first("x", "20s", scope="s", compact=True),
        face.first_many(["x"], "20s", scope="s", compact=True),
    ):
        with pytest.raises(ForeignData, match=says) as refused:
            await ask
        assert refused.value.redis_key == key.decode()
    assert raw.dump(key) == before
    assert raw.exists(*gate.mark("x", "20s", "s", compact=True).keys) == 1


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_remembered_id_takes_at_most_25_bytes(alone: str, clock: Clock) -> None:
    many, parts = 160_000, 8
    with Gate(alone, clock=clock) as gate, redis.Redis.from_url(alone) as raw:
        gate.first_many(range(100), "1h", scope="warm", compact=True)
        before, ids, measured = raw.info("memory")["used_memory"], count(), []
        # Given ids that come evenly over three windows
        for _ in range(3 * parts):
            clock.advance(3600 / parts)
            part = list(islice(ids, many // parts))
            assert all(gate.first_many(part, "1h", compact=True))
            measured.append((raw.info("memory")["used_memory"] - before) / many)
        # Then as soon as a window is full, and from then on, each id within the window takes at most that
        assert max(measured[parts - 1 :]) <= 25  # what an allocation takes differs among servers
        # And every key goes by itself within two windows
        left = [raw.pttl(key) for key in raw.scan_iter("ig1:*:seen:*", count=1000)]
        assert len(left) >= 64
        assert all(0 < ms <= 2 * 3_600_000 for ms in left)


def test_ids_of_a_seen_set_are_spread_over_so_many_shards_and_no_more() -> None:
    sets = SeenSets("n", None)
    found = {sets.first("s", f"k{n}", "1h").keys[0] for n in range(1000)}
    assert found == {keys.seen("n", "s", shard)[0] for shard in range(SHARDS)}
