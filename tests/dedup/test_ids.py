"""Ids of a dedup set: `add` answers as `first` does, in a tenth of the memory."""

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

from idemgate import Gate
from idemgate.core import keys
from idemgate.core.calls import Call, call
from idemgate.dedup.dedup import SHARDS, DedupCalls
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from tests.conftest import Face
from tests.dedup.dedup_calls import calls_of

pytestmark = pytest.mark.one_in(5)

WINDOW = 3_600_000
"""ms. Long, since the server expires a page by its own clock."""
START = 1_700_000_000.0


async def test_an_id_is_new_once_within_the_retention_to_the_millisecond(face: Face, clock: Clock) -> None:
    dedup = face.dedup("s", "20s")
    assert [await dedup.add("k") for _ in range(3)] == [True, False, False]
    # When the retention is almost over, the id is still known, and adding it again does not renew it
    clock.advance("19.999s")
    assert not await dedup.add("k")
    clock.advance("1ms")
    assert await dedup.add("k")
    assert not await dedup.add("k")


async def test_add_many_answers_in_order_and_only_the_first_of_equal_ids_is_new(face: Face) -> None:
    dedup = face.dedup("s", "20s")
    assert await dedup.add("b")
    assert await dedup.add_many(["a", "b", "c", "a", 7, "7", b"c"]) == [True, False, True, False, True, False, False]
    assert await dedup.add_many(iter(["d", "a"])) == [True, False]
    assert await dedup.add_many([]) == []


async def test_add_many_splits_a_batch_that_exceeds_one_call_of_a_shard(face: Face) -> None:
    dedup, ids = face.dedup("s", "20s"), range(20_000)
    assert await dedup.add_many(ids) == [True] * 20_000
    assert await dedup.add_many(ids) == [False] * 20_000


async def test_scopes_namespaces_and_records_of_first_are_separate(face: Face, url: str, namespace: str) -> None:
    assert await face.dedup("first", "20s").add("k")
    assert await face.first("k", "20s")
    assert await face.dedup("other:{x}", "20s").add("k")
    with Gate(url, namespace=f"{namespace}-2") as other:
        assert other.dedup("first", "20s").add("k")
    assert (await face.inspect("k", scope="other:{x}")).state == "absent"


async def test_add_many_answers_as_first_many_does(face: Face, clock: Clock) -> None:
    # Given a stream of ids with many duplicates over some ten retentions
    dice = random.Random(1)
    for _ in range(150):
        clock.advance(dice.randrange(3_000) / 1000)
        ids = [dice.randrange(60) for _ in range(dice.randrange(1, 20))]
        # Then both give the same answers
        assert await face.dedup("first", "20s").add_many(ids) == await face.first_many(ids, "20s")


# -- against a model --------------------------------------------------------------------------------------------------


class Shard:
    """One shard of a dedup set, called with digests, and a model of its answers."""

    def __init__(self, gate: Gate, clock: Clock, scope: str) -> None:
        self.gate = gate
        self.clock = clock
        self.keys = keys.dedup_ids(gate.namespace, scope, 0)
        self.marks: dict[bytes, list[tuple[int, int]]] = {}
        self.requests = 0

    def request(self, digests: list[bytes], window: int = WINDOW) -> Call[list[bool]]:
        self.requests += 1
        args = (b"%d" % self.clock.microseconds(), window, self.requests.to_bytes(5), *digests)
        return call("dedup/add", self.keys, args, lambda reply: [new == 1 for new in reply[2:]])

    def add(self, digests: list[bytes], window: int = WINDOW) -> list[bool]:
        """Return the answers; a copy of the request gets the same ones."""
        request = self.request(digests, window)
        answers = self.gate.context.link.run(request)
        assert self.gate.context.link.run(request) == answers
        return answers

    def check(self, digests: list[bytes], window: int) -> None:
        """Check the answers: an id is known for the retention it was added with; if it was added within the caller's
        retention, it may be known."""
        now = self.clock.microseconds() // 1000
        for digest, new in zip(digests, self.add(digests, window), strict=True):
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


def test_pages_grow_and_shrink_without_losing_an_id(gate: Gate, clock: Clock) -> None:
    # Given a rate that rises to thousands per retention and falls again
    dice = random.Random(2)
    shard = Shard(gate, clock, "s")
    for many in (5, 50, 400, 400, 400, 100, 10, 2):
        for _ in range(20):
            clock.advance(WINDOW / 10_000)
            fresh = [dice.getrandbits(64).to_bytes(8) for _ in range(many)]
            known = dice.sample(list(shard.marks), min(many, len(shard.marks)))
            shard.check([*fresh, *known], WINDOW)


def test_a_page_that_replaces_an_expired_one_keeps_none_of_its_ids(gate: Gate, clock: Clock) -> None:
    # Given a page with many buckets, the next page, and then a page that replaces the first, with a single id
    dice, shard = random.Random(3), Shard(gate, clock, "s")
    many = [dice.getrandbits(64).to_bytes(8) for _ in range(1000)]
    shard.check(many, WINDOW)
    for _ in range(2):
        clock.advance(WINDOW / 1000)
        shard.check([dice.getrandbits(64).to_bytes(8)], WINDOW)
    # Then all ids of the first page are new again
    shard.check(many, WINDOW)


async def test_a_retention_of_ten_years_ends_on_time(face: Face, clock: Clock) -> None:
    # Given ids from the beginning and the middle of a page of ten years, whose unit of time is 74 ms
    dedup = face.dedup("s", "3650d")
    assert await dedup.add("a")
    clock.advance("1234d")
    assert await dedup.add("b")
    # Then each is known for ten years, and at most 2 s longer
    clock.advance("2415d23h59m59s")
    assert not await dedup.add("a")
    clock.advance("1s")
    assert await dedup.add("a")
    clock.advance("1233d23h59m59s")
    assert not await dedup.add("b")
    clock.advance("2s")
    assert await dedup.add("b")


async def test_no_id_is_lost_when_the_clock_jumps_back(face: Face, clock: Clock) -> None:
    dedup = face.dedup("s", "20s")
    clock.advance("1h")
    assert await dedup.add("k")
    clock.set(START)
    assert not await dedup.add("k")
    assert await dedup.add("other")
    assert not await dedup.add("other")


# -- copies of a request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["add", "add_many"])
async def test_a_copy_of_a_request_gets_the_same_answer(gate: Gate, face: Face, clock: Clock, method: str) -> None:
    dedup = face.dedup("s", "20s")
    calls = calls_of(gate, "s", 20_000)

    # Given a request for a new id whose reply was lost, and a request for a duplicate
    def request() -> Any:
        return calls.add("k") if method == "add" else calls.add_many(["k", "k"])

    def run(what: Any) -> Any:
        return gate.context.link.run(what) if method == "add" else gate.context.link.run_all(what)

    first, second = request(), request()
    yes, no = (True, False) if method == "add" else ([True, False], [False, False])
    assert run(first) == yes
    assert run(second) == no
    # When copies arrive after other requests, early and late
    await dedup.add_many(range(1000))
    for _ in range(2):
        clock.advance("9s")
        assert run(second) == no
        assert run(first) == yes
    # Then the copies did not renew the id
    clock.advance("2s")
    assert await dedup.add("k")


# -- collisions -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_id_collides_at_the_documented_rate(gate: Gate, clock: Clock) -> None:
    # Given digests of 16 random bits instead of 64, so that n / 2^16 is the bound
    dice, bits, tries = random.Random(3), 16, 3000
    shard = Shard(gate, clock, "s")
    wrong = 0
    for _ in range(tries):
        wrong += gate.context.link.run(shard.request([dice.getrandbits(bits).to_bytes(8)])) == [False]
    # Then each new id collided with probability (ids before it) / 2^16: 69 +- 8 in all
    expected = tries * tries / 2 / 2**bits
    assert expected - 4 * expected**0.5 < wrong < expected + 4 * expected**0.5
    # And expired ids do not collide
    clock.advance(WINDOW / 1000)
    assert shard.add([dice.getrandbits(bits).to_bytes(8)]) == [True]


def test_a_digest_that_overlaps_two_stored_ids_is_not_found(gate: Gate, clock: Clock) -> None:
    # Given a stored id whose time and check bytes look like part of a digest
    shard = Shard(gate, clock, "s")
    assert shard.add([bytes(8)]) == [True]
    # Then zeros that span two entries are another id
    assert shard.add([bytes(7) + b"\1"]) == [True]
    assert shard.add([bytes(6) + b"\1\0"]) == [True]


# -- foreign data -----------------------------------------------------------------------------------------------------

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
async def test_foreign_data_raises_with_its_key_and_stays_unchanged(
    face: Face, gate: Gate, raw: Any, what: str, page: int
) -> None:
    put, says = FOREIGN[what]
    pages = calls_of(gate, "s", 20_000).add("x").keys
    key = pages[page]
    put(raw, key)
    before = raw.dump(key)
    dedup = face.dedup("s", "20s")
    for ask in (dedup.add("x"), dedup.add_many(["x"])):
        with pytest.raises(UnexpectedData, match=says) as refused:
            await ask
        assert refused.value.redis_key == key.decode()
    assert raw.dump(key) == before
    assert raw.exists(*pages) == 1


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stored_id_takes_at_most_25_bytes(alone: str, clock: Clock) -> None:
    many, parts = 160_000, 8
    with Gate(alone, clock=clock) as gate, redis.Redis.from_url(alone) as raw:
        gate.dedup("warm", "1h").add_many(range(100))
        dedup = gate.dedup("first", "1h")
        before, ids, measured = raw.info("memory")["used_memory"], count(), []
        # Given ids that arrive evenly over three retentions
        for _ in range(3 * parts):
            clock.advance(3600 / parts)
            part = list(islice(ids, many // parts))
            assert all(dedup.add_many(part))
            measured.append((raw.info("memory")["used_memory"] - before) / many)
        # Then from the end of the first retention on, each id within the retention takes at most that
        assert max(measured[parts - 1 :]) <= 25  # what an allocation takes differs among servers
        # And every key expires within two retentions
        left = [raw.pttl(key) for key in raw.scan_iter("ig2:*:dedup:*", count=1000)]
        assert len(left) >= 64
        assert all(0 < ms <= 2 * 3_600_000 for ms in left)


def test_ids_are_spread_over_all_shards() -> None:
    calls = DedupCalls("n", None, "s", 3_600_000)
    found = {calls.add(f"k{n}").keys[0] for n in range(1000)}
    assert found == {keys.dedup_ids("n", "s", shard)[0] for shard in range(SHARDS)}
