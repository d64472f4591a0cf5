"""Values of a dedup set: the first value of an id stays, and every caller gets it."""

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

from idemgate import Gate, InvalidArgument
from idemgate.core import keys
from idemgate.core.calls import Call, call
from idemgate.dedup.dedup import unpack_value
from idemgate.errors import DecodeError, UnexpectedData
from idemgate.testing import Clock
from idemgate.types import DedupValue
from tests.conftest import Face
from tests.dedup.dedup_calls import calls_of
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(5)

WINDOW = 3_600_000
"""ms. Long, since the server expires a page by its own clock."""


async def test_the_first_value_stays_for_its_retention_to_the_millisecond(face: Face, clock: Clock) -> None:
    dedup = face.dedup("s", "20s")
    assert await dedup.get("k") is None
    assert await dedup.get_or_set("k", 1) == DedupValue(True, 1)
    assert await dedup.get_or_set("k", 2) == DedupValue(False, 1)
    # When the retention is almost over, the value is still stored, and reading it does not renew it
    clock.advance("19.999s")
    assert await dedup.get_or_set("k", 3) == DedupValue(False, 1)
    assert await dedup.get("k") == 1
    clock.advance("1ms")
    assert await dedup.get("k") is None
    assert await dedup.get_or_set("k", 4) == DedupValue(True, 4)
    assert await dedup.get("k") == 4


ID = UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    "value",
    ["", "pay_3f9a81c2", "x" * 16, "\u00e9" * 8, b"", b"\0" * 16, b"\xff", 0, -1, -128, 128, 2**127 - 1, -(2**127), ID],
)  # fmt: skip
async def test_a_value_is_returned_unchanged(face: Face, value: Any) -> None:
    dedup = face.dedup("s", "20s")
    assert await dedup.get_or_set("k", value) == DedupValue(True, value)
    again = (await dedup.get_or_set("k", "other")).value
    assert (again, type(again)) == (value, type(value))
    found = await dedup.get("k")
    assert (found, type(found)) == (value, type(value))


@for_each(
    ("value", "says"),
    [
        ("x" * 17, r"value='x{17}': 17 bytes long\. Store text or bytes of at most 16 bytes.*`once`"),
        ("\u00e9" * 9, "18 bytes long"),
        (b"x" * 17, "17 bytes long"),
        (2**127, "17 bytes long"),
        ("\ud800", "Unicode"),
        (True, r"value=True: a bool cannot be stored\. Store text"),
        (None, "a NoneType cannot be stored"),
        (1.5, "a float cannot be stored"),
        ([1], "a list cannot be stored"),
    ],
)
async def test_a_value_that_is_too_long_or_of_another_type_raises_before_a_write(
    face: Face, raw: Any, namespace: str, value: Any, says: str
) -> None:
    dedup = face.dedup("s", "20s")
    for ask in (dedup.get_or_set("k", value), dedup.get_or_set_many([("a", 1), ("k", value)])):
        with pytest.raises(InvalidArgument, match=f"(?s){says}"):
            await ask
    assert list(raw.scan_iter(f"*{namespace}:seen*")) == []


async def test_get_or_set_many_answers_in_order_and_the_first_of_equal_ids_sets_the_value(face: Face) -> None:
    dedup = face.dedup("s", "20s")
    await dedup.get_or_set("b", "old")
    pairs = [("a", "1"), ("b", "2"), ("a", "3"), (7, "4"), ("7", "5"), (b"c", "6")]
    found = [(True, "1"), (False, "old"), (False, "1"), (True, "4"), (False, "4"), (True, "6")]
    assert await dedup.get_or_set_many(pairs) == [DedupValue(*one) for one in found]
    assert await dedup.get_or_set_many({"a": "x", "d": "y"}.items()) == [DedupValue(False, "1"), DedupValue(True, "y")]
    assert await dedup.get_or_set_many([]) == []


async def test_get_or_set_many_splits_a_batch_that_exceeds_one_call_of_a_shard(face: Face) -> None:
    dedup = face.dedup("s", "20s")
    many = [(number, number) for number in range(10_000)]
    assert await dedup.get_or_set_many(many) == [DedupValue(True, number) for number in range(10_000)]
    others = [(number, -1) for number in range(10_000)]
    assert await dedup.get_or_set_many(others) == [DedupValue(False, number) for number in range(10_000)]
    assert [await dedup.get(number) for number in (0, 4711, 9_999)] == [0, 4711, 9_999]


async def test_one_of_many_callers_sets_the_value_and_all_get_it(face: Face) -> None:
    dedup = face.dedup("s", "20s")
    answers = await asyncio.gather(*(dedup.get_or_set("k", number) for number in range(50)))
    [first] = [answer.value for answer in answers if answer.first]
    assert {answer.value for answer in answers} == {first}


async def test_scopes_namespaces_and_ids_without_values_are_separate(face: Face, url: str, namespace: str) -> None:
    dedup, other_scope = face.dedup("s", "20s"), face.dedup("other:{x}", "20s")
    assert await dedup.get_or_set("k", 1)
    assert await dedup.add("k")
    assert await other_scope.get_or_set("k", 2) == DedupValue(True, 2)
    assert await other_scope.get("k") == 2
    with Gate(url, namespace=f"{namespace}-2") as other:
        assert other.dedup("s", "20s").get_or_set("k", 3) == DedupValue(True, 3)
    assert (await face.inspect("k", scope="s")).state == "absent"


# -- against a model --------------------------------------------------------------------------------------------------


def _answers(reply: list[Any]) -> list[tuple[int, bytes]]:
    return list(zip(reply[2::2], reply[3::2], strict=True))


class Shard:
    """One shard, called with digests, and a model of its answers for one retention."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self.gate = gate
        self.clock = clock
        self.keys = keys.dedup_values(gate.namespace, "s", 0)
        self.known: dict[bytes, tuple[int, bytes]] = {}
        self.requests = 0

    def request(self, digests: list[bytes]) -> tuple[list[bytes], Call[list[tuple[int, bytes]]]]:
        self.requests += 1
        values = [self.requests.to_bytes(9) + digest for digest in digests]
        args = [b"%d" % self.clock.microseconds(), WINDOW, self.requests.to_bytes(5)]
        pairs = [word for pair in zip(digests, values, strict=True) for word in pair]
        return values, call("dedup/get_or_set", self.keys, (*args, *pairs), _answers)

    def check(self, digests: list[bytes]) -> None:
        now = self.clock.microseconds() // 1000
        values, request = self.request(digests)
        answers = self.gate.context.link.run(request)
        for digest, value, answer in zip(digests, values, answers, strict=True):
            made, held = self.known.get(digest, (-WINDOW, b""))
            if made + WINDOW > now:
                assert answer == (0, held)
            else:
                assert answer == (1, value)
                self.known[digest] = now, value
        # And a copy of the request gets the same answers
        assert self.gate.context.link.run(request) == answers


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


@pytest.mark.parametrize("method", ["get_or_set", "get_or_set_many"])
async def test_a_copy_of_a_request_gets_the_same_answer(gate: Gate, face: Face, clock: Clock, method: str) -> None:
    dedup = face.dedup("s", "20s")
    calls = calls_of(gate, "s", 20_000)

    # Given a request that set a value and whose reply was lost, and a request of a duplicate
    def request(value: int) -> Any:
        return calls.get_or_set("k", value) if method == "get_or_set" else calls.get_or_set_many([("k", value)])

    def run(what: Any) -> Any:
        return gate.context.link.run(what) if method == "get_or_set" else gate.context.link.run_all(what)[0]

    first, second = request(1), request(2)
    assert (run(first), run(second)) == (DedupValue(True, 1), DedupValue(False, 1))
    # When copies arrive after other requests, early and late
    await dedup.get_or_set_many([(number, number) for number in range(500)])
    for _ in range(2):
        clock.advance("9s")
        assert (run(second), run(first)) == (DedupValue(False, 1), DedupValue(True, 1))
    # Then the copies did not renew the value
    clock.advance("2s")
    assert await dedup.get("k") is None


@pytest.mark.slow
def test_a_new_id_gets_the_value_of_another_at_the_documented_rate(gate: Gate, clock: Clock) -> None:
    # Given digests of 16 random bits instead of 64, so that n / 2^16 is the bound
    dice, bits, tries, wrong = random.Random(3), 16, 3000, 0
    shard = Shard(gate, clock)
    for _ in range(tries):
        _, request = shard.request([dice.getrandbits(bits).to_bytes(8)])
        [(is_first, _)] = gate.context.link.run(request)
        wrong += not is_first
    # Then each new id collided with probability (ids before it) / 2^16: 69 +- 8 in all
    expected = tries * tries / 2 / 2**bits
    assert expected - 4 * expected**0.5 < wrong < expected + 4 * expected**0.5


# -- foreign data -----------------------------------------------------------------------------------------------------

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
async def test_foreign_data_raises_with_its_key_and_stays_unchanged(
    face: Face, raw: Any, namespace: str, page: int, fields: dict[str, bytes], says: str
) -> None:
    dedup = face.dedup("s", "20s")
    key = calls_of(face.gate, "s", 20_000).get("x").keys[page]
    raw.hset(key, mapping=fields)
    before = raw.dump(key)
    asks = [dedup.get_or_set("x", 1), dedup.get_or_set_many([("x", 1)])]
    if "status" not in fields:
        asks.append(dedup.get("x"))
    for ask in asks:
        with pytest.raises(UnexpectedData, match=says) as refused:
            await ask
        assert refused.value.redis_key == key.decode()
    assert raw.dump(key) == before


@pytest.mark.parametrize("data", [b"", b"x" * 16, b"\x80" + b"x" * 16, b"\x31" + b"x" * 16, b"\x21\xff" + b"x" * 15])
def test_a_corrupt_value_raises(gate: Gate, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"dedup|decode"):
        unpack_value(data)
    with pytest.raises(DecodeError):
        calls_of(gate, "s", 20_000).get_or_set("x", 1).answer([b"ok", 1, 0, data])


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_id_with_a_value_of_16_bytes_takes_at_most_48_bytes(alone: str, clock: Clock) -> None:
    many, parts = 160_000, 8
    with Gate(alone, clock=clock) as gate, redis.Redis.from_url(alone) as raw:
        gate.dedup("warm", "1h").get_or_set_many([(number, "x" * 16) for number in range(100)])
        dedup = gate.dedup("s", "1h")
        before, ids, measured = raw.info("memory")["used_memory"], count(), []
        # Given ids that arrive evenly over three retentions
        for _ in range(3 * parts):
            clock.advance(3600 / parts)
            part = [(number, f"{number:016}") for number in islice(ids, many // parts)]
            assert all(found.first for found in dedup.get_or_set_many(part))
            measured.append((raw.info("memory")["used_memory"] - before) / many)
        # Then from the end of the first retention on, each id within the retention takes at most that
        most = 50 if raw.info("server")["redis_version"].startswith("8.0.") else 48  # 48.4 was seen there
        assert max(measured[parts - 1 :]) <= most, measured
        # And every key expires within two retentions
        left = [raw.pttl(key) for key in raw.scan_iter("ig2:*:dedup:*", count=1000)]
        assert len(left) >= 64
        assert all(0 < ms <= 2 * 3_600_000 for ms in left)
