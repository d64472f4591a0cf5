"""Small values beside compact marks: the first that is kept for an id stays, and all are told it."""

from __future__ import annotations

import asyncio
import random
from itertools import count, islice
from typing import Any
from uuid import UUID, uuid4

import msgpack
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from idemgate import BadInput, ForeignData, Gate, Kept, NotDecodable
from idemgate.core import keys
from idemgate.core.calls import Call, call
from idemgate.dedup import value as small
from idemgate.testing import Clock

WINDOW = 3_600_000
"""ms. Long, since the server lets a page go by its own clock."""


async def test_the_first_value_stays_for_its_window_to_the_millisecond(face: Any, clock: Clock) -> None:
    assert await face.kept("k") is None
    assert await face.keep("k", 1, "20s") == Kept(True, 1)
    assert await face.keep("k", 2, "20s") == Kept(False, 1)
    # When the window is all but over, it is still kept; and being asked for does not renew it
    clock.advance("19.999s")
    assert await face.keep("k", 3, "20s") == Kept(False, 1)
    assert await face.kept("k") == 1
    clock.advance("1ms")
    assert await face.kept("k") is None
    assert await face.keep("k", 4, "20s") == Kept(True, 4)
    assert await face.kept("k") == 4


ID = UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    "value",
    ["", "pay_3f9a81c2", "x" * 16, "\u00e9" * 8, b"", b"\0" * 16, b"\xff", 0, -1, -128, 128, 2**127 - 1, -(2**127), ID],
)  # fmt: skip
async def test_a_value_comes_back_as_it_was(face: Any, value: Any) -> None:
    assert await face.keep("k", value, "20s") == Kept(True, value)
    again = (await face.keep("k", "other", "20s")).value
    assert (again, type(again)) == (value, type(value))
    found = await face.kept("k")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x" * 17, r"value='x{17}': 17 bytes long\. Keep text or bytes of at most 16 bytes.*`once`"),
        ("\u00e9" * 9, "18 bytes long"),
        (b"x" * 17, "17 bytes long"),
        (2**127, "17 bytes long"),
        ("\ud800", "Unicode"),
        (True, r"value=True: a bool cannot be kept\. Keep text"),
        (None, "a NoneType cannot be kept"),
        (1.5, "a float cannot be kept"),
        ([1], "a list cannot be kept"),
    ],
)
async def test_what_is_too_long_or_of_another_type_is_refused_before_anything_is_written(
    face: Any, raw: Any, namespace: str, value: Any, says: str
) -> None:
    for ask in (face.keep("k", value, "20s"), face.keep_many([("a", 1), ("k", value)], "20s")):
        with pytest.raises(BadInput, match=f"(?s){says}"):
            await ask
    assert list(raw.scan_iter(f"*{namespace}:seen*")) == []


async def test_many_are_answered_in_order_and_of_equal_ids_the_first_is_first(face: Any) -> None:
    await face.keep("b", "old", "20s")
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), (7, "4"), ("7", "5"), (b"c", "6")]
    assert await face.keep_many(pairs, "20s") == [
        Kept(True, "1"), Kept(False, "old"), Kept(False, "1"), Kept(True, "4"), Kept(False, "4"), Kept(True, "6"),
    ]  # fmt: skip
    assert await face.keep_many({"a": "x", "d": "y"}.items(), "20s") == [Kept(False, "1"), Kept(True, "y")]
    assert await face.keep_many([], "20s") == []


async def test_a_batch_of_more_than_a_shard_takes_at_once(face: Any) -> None:
    many = [(number, number) for number in range(10_000)]
    assert await face.keep_many(many, "20s") == [Kept(True, number) for number in range(10_000)]
    others = [(number, -1) for number in range(10_000)]
    assert await face.keep_many(others, "20s") == [Kept(False, number) for number in range(10_000)]
    assert [await face.kept(number) for number in (0, 4711, 9_999)] == [0, 4711, 9_999]


async def test_of_many_callers_one_is_first_and_all_are_told_its_value(face: Any) -> None:
    answers = await asyncio.gather(*(face.keep("k", number, "20s") for number in range(50)))
    [first] = [answer.value for answer in answers if answer.first]
    assert {answer.value for answer in answers} == {first}


async def test_scopes_namespaces_and_marks_without_values_are_sets_of_their_own(
    face: Any, url: str, namespace: str
) -> None:
    assert await face.keep("k", 1, "20s")
    assert await face.first("k", "20s", scope="keep", compact=True)
    assert await face.keep("k", 2, "20s", scope="other:{x}") == Kept(True, 2)
    assert await face.kept("k", scope="other:{x}") == 2
    with Gate(url, namespace=f"{namespace}-2") as other:
        assert other.keep("k", 3, "20s") == Kept(True, 3)
    assert (await face.inspect("k", scope="keep")).state == "absent"


# -- against a model --------------------------------------------------------------------------------------------------


def _answers(reply: list[Any]) -> list[tuple[int, bytes]]:
    return list(zip(reply[2::2], reply[3::2], strict=True))


class Shard:
    """One shard, asked by digests, and what it should answer where there is one window."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self.gate = gate
        self.clock = clock
        self.keys = keys.kept(gate.claims.namespace, "s", 0)
        self.known: dict[bytes, tuple[int, bytes]] = {}
        self.requests = 0

    def request(self, digests: list[bytes]) -> tuple[list[bytes], Call[list[tuple[int, bytes]]]]:
        self.requests += 1
        values = [self.requests.to_bytes(9) + digest for digest in digests]
        args = [b"%d" % self.clock.microseconds(), WINDOW, self.requests.to_bytes(5)]
        pairs = [word for pair in zip(digests, values, strict=True) for word in pair]
        return values, call("dedup/keep", self.keys, (*args, *pairs), _answers)

    def check(self, digests: list[bytes]) -> None:
        now = self.clock.microseconds() // 1000
        values, request = self.request(digests)
        answers = self.gate.link.run(request)
        for digest, value, answer in zip(digests, values, answers, strict=True):
            made, held = self.known.get(digest, (-WINDOW, b""))
            if made + WINDOW > now:
                assert answer == (0, held)
            else:
                assert answer == (1, value)
                self.known[digest] = now, value
        # And a copy of the request is told the same
        assert self.gate.link.run(request) == answers


STEPS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, WINDOW // 50), st.sampled_from([WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW // 2])),
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    ),
    max_size=30,
)


@given(steps=STEPS)
@settings(max_examples=40)
def test_every_history_is_answered_by_the_model(url: str, steps: Any) -> None:
    clock = Clock()
    with Gate(url, namespace=f"model-{uuid4()}", clock=clock) as gate:
        shard = Shard(gate, clock)
        for pause, numbers in steps:
            clock.advance(pause / 1000)
            shard.check([number.to_bytes(8) for number in numbers])


def test_pages_grow_and_shrink_without_losing_a_value(gate: Gate, clock: Clock) -> None:
    dice = random.Random(2)
    shard = Shard(gate, clock)
    for many in (5, 50, 400, 400, 100, 10, 2):
        for _ in range(20):
            clock.advance(WINDOW / 10_000)
            fresh = [dice.getrandbits(64).to_bytes(8) for _ in range(many)]
            shard.check([*fresh, *dice.sample(list(shard.known), min(many, len(shard.known)))])


@pytest.mark.parametrize("asked", ["one", "many"])
async def test_a_copy_of_a_request_is_told_that_it_was_the_first(
    gate: Gate, face: Any, clock: Clock, asked: str
) -> None:
    # Given a first whose reply was lost, and one for a duplicate
    def request(value: int) -> Any:
        if asked == "one":
            return gate.seen.keep("keep", "k", value, "20s")
        return gate.seen.keep_many("keep", [("k", value)], "20s")

    def run(what: Any) -> Any:
        return gate.link.run(what) if asked == "one" else gate.link.run_all(what)[0]

    first, second = request(1), request(2)
    assert (run(first), run(second)) == (Kept(True, 1), Kept(False, 1))
    # When copies come, at once and late, after others
    await face.keep_many([(number, number) for number in range(500)], "20s")
    for _ in range(2):
        clock.advance("9s")
        assert (run(second), run(first)) == (Kept(False, 1), Kept(True, 1))
    # Then they did not renew it
    clock.advance("2s")
    assert await face.kept("k") is None


def test_a_new_id_gets_the_value_of_another_as_often_as_is_said(gate: Gate, clock: Clock) -> None:
    # Given digests of 16 random bits instead of 64, so that n / 2^16 is the bound
    dice, bits, tries, wrong = random.Random(3), 16, 3000, 0
    shard = Shard(gate, clock)
    for _ in range(tries):
        _, request = shard.request([dice.getrandbits(bits).to_bytes(8)])
        [(is_first, _)] = gate.link.run(request)
        wrong += not is_first
    # Then of each new id the chance was how many others were kept / 2^16: 69 +- 8 in all
    expected = tries * tries / 2 / 2**bits
    assert expected - 4 * expected**0.5 < wrong < expected + 4 * expected**0.5


# -- what is not ours -------------------------------------------------------------------------------------------------

HEAD = msgpack.packb([1, 1_700_000_000_000, 1_700_000_020_000, 20_000, 1])


@pytest.mark.damages("wrong-type", "undecodable", "no-expiry")
@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"status": "COMPLETED"}, "another layout"),
        ({"": b"\x95\x02" + HEAD[2:]}, "another layout"),
        ({"": HEAD, "0": b"x" * 17}, "a bucket of another layout"),
    ],
)
async def test_foreign_data_is_named_and_left_alone(
    face: Any, raw: Any, namespace: str, page: int, fields: dict[str, bytes], says: str
) -> None:
    gate: Gate = face.gate
    key = gate.seen.kept("keep", "x").keys[page]
    raw.hset(key, mapping=fields)
    before = raw.dump(key)
    asks = [face.keep("x", 1, "20s"), face.keep_many([("x", 1)], "20s")]
    if "status" not in fields:
        asks.append(face.kept("x"))
    for ask in asks:
        with pytest.raises(ForeignData, match=says) as refused:
            await ask
        assert refused.value.redis_key == key.decode()
    assert raw.dump(key) == before


@pytest.mark.parametrize("data", [b"", b"x" * 16, b"\x80" + b"x" * 16, b"\x31" + b"x" * 16, b"\x21\xff" + b"x" * 15])
def test_what_is_no_value_is_not_decoded(gate: Gate, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"kept|decode"):
        small.unpacked(data)
    with pytest.raises(NotDecodable):
        gate.seen.keep("keep", "x", 1, "20s").answer([b"ok", 1, 0, data])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_an_id_with_a_value_of_16_bytes_takes_at_most_48_bytes(alone: str, clock: Clock) -> None:
    many, parts = 160_000, 8
    with Gate(alone, clock=clock) as gate, redis.Redis.from_url(alone) as raw:
        gate.keep_many([(number, "x" * 16) for number in range(100)], "1h", scope="warm")
        before, ids, measured = raw.info("memory")["used_memory"], count(), []
        # Given ids that come evenly over three windows
        for _ in range(3 * parts):
            clock.advance(3600 / parts)
            part = [(number, f"{number:016}") for number in islice(ids, many // parts)]
            assert all(kept.first for kept in gate.keep_many(part, "1h"))
            measured.append((raw.info("memory")["used_memory"] - before) / many)
        # Then as soon as a window is full, and from then on, each id within the window takes at most that
        most = 50 if raw.info("server")["redis_version"].startswith("8.0.") else 48  # 48.4 was seen there
        assert max(measured[parts - 1 :]) <= most, measured
        # And every key goes by itself within two windows
        left = [raw.pttl(key) for key in raw.scan_iter("ig1:*:seen:*", count=1000)]
        assert len(left) >= 64
        assert all(0 < ms <= 2 * 3_600_000 for ms in left)
