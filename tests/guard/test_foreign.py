"""A key of our namespace that holds what we did not write: the error names it, and it is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.errors import DecodeError, ResultUnavailable, UnexpectedData
from tests.claims import claims_of
from tests.for_each import for_each

pytestmark = [pytest.mark.damages("wrong-type", "undecodable", "no-expiry"), pytest.mark.one_in(5)]
RESULT = 12
"""Where it begins in a record that was done at the first attempt (lib/record/format.lua)."""
Put = Callable[[Any, bytes], Any]
FOREIGN: dict[str, tuple[Put, str]] = {
    "a list": (lambda raw, key: raw.rpush(key, "1"), "another type than a string"),
    "a set": (lambda raw, key: raw.sadd(key, "1"), "another type than a string"),
    "a sorted set": (lambda raw, key: raw.zadd(key, {"1": 1}), "another type than a string"),
    "a stream": (lambda raw, key: raw.xadd(key, {"a": "1"}), "another type than a string"),
    "a hash": (lambda raw, key: raw.hset(key, mapping={"status": "COMPLETED"}), "another type than a string"),
    "a number": (lambda raw, key: raw.set(key, "1"), "another layout"),
    "nothing": (lambda raw, key: raw.set(key, ""), "another layout"),
    "a later layout": (lambda raw, key: raw.set(key, b"\xc2v" + bytes(60)), "another layout"),
    "an unknown state": (lambda raw, key: raw.set(key, b"\xc1z" + bytes(60)), "another layout"),
    "a state that is any letter": (lambda raw, key: raw.set(key, b"\xc1." + bytes(60)), "another layout"),
    "a state that is no letter": (lambda raw, key: raw.set(key, b"\xc1%" + bytes(60)), "another layout"),
    "what ends too early": (lambda raw, key: raw.set(key, b"\xc1v" + bytes(34)), "another layout"),
    "a fingerprint that ends too early": (
        lambda raw, key: raw.set(key, b"\xc1v" + bytes(35) + b"\x10" + bytes(15)),
        "another layout",
    ),
    "a result that ends before it begins": (lambda raw, key: raw.set(key, b"\xf8" + bytes(10)), "another layout"),
    "a mark without its token": (lambda raw, key: raw.set(key, b"\xfe" + bytes(26)), "another layout"),
}


@pytest.fixture(params=FOREIGN)
def foreign(request: pytest.FixtureRequest, raw: Any, gate: Gate) -> tuple[bytes, str]:
    """The Redis key of idempotency key "x" of scope "s", which holds what is not ours, and what is said of it."""
    put, says = FOREIGN[request.param]
    key = claims_of(gate).key("s", "x")[0]
    put(raw, key)
    return key, says


ASK: dict[str, Callable[[Any], Any]] = {
    "claim": lambda face: face.claim("x", scope="s"),
    "claim with everything": lambda face: face.claim(
        "x", scope="s", fingerprint=1, max_attempts=1, on_lease_loss="hold"
    ),
    "first": lambda face: face.first("x", "1h", scope="s"),
    "first_many": lambda face: face.first_many(["x"], "1h", scope="s"),
    "inspect": lambda face: face.inspect("x", scope="s"),
    "forget": lambda face: face.forget("x", scope="s"),
    "forget by force": lambda face: face.forget("x", scope="s", force=True),
    "resolve": lambda face: face.resolve("x", scope="s", done=True, retention="1h"),
    "once": lambda face: face.once(key="{k}", scope="s")(lambda k: k)("x"),
    "once, at most": lambda face: face.once(key="{k}", scope="s", at_most_once=True)(lambda k: k)("x"),
    "once, waiting": lambda face: face.once(key="{k}", scope="s", on_in_progress="wait")(lambda k: k)("x"),
    "once, whatever happens": lambda face: face.once(key="{k}", scope="s", on_store_error="run")(lambda k: k)("x"),
    "once, locally": lambda face: face.once(key="{k}", scope="s", on_store_error="local")(lambda k: k)("x"),
}


@for_each("ask", ASK)
async def test_foreign_data_is_named_and_left_alone(face: Any, raw: Any, foreign: tuple[bytes, str], ask: str) -> None:
    key, says = foreign
    before = raw.dump(key)
    with pytest.raises(UnexpectedData, match=says) as refused:
        await ASK[ask](face)
    assert refused.value.redis_key == key.decode()
    assert str(refused.value).startswith(key.decode())
    assert raw.dump(key) == before
    assert raw.ttl(key) == -1


async def test_an_owner_whose_record_was_overwritten_is_told_and_writes_nothing(
    face: Any, raw: Any, gate: Gate
) -> None:
    claim = await face.claim("x", scope="s")
    key = claims_of(gate).key("s", "x")[0]
    raw.set(key, "another program's")
    for act in (claim.complete, claim.release, claim.extend, lambda: claim.checkpoint(1)):
        with pytest.raises(UnexpectedData):
            await act()
    assert raw.get(key) == b"another program's"


async def test_of_many_marks_the_foreign_one_is_named(face: Any, raw: Any, gate: Gate) -> None:
    key = claims_of(gate).key("first", "b")[0]
    raw.set(key, "1")
    with pytest.raises(UnexpectedData) as refused:
        await face.first_many(["a", "b", "c"], "1h")
    assert refused.value.redis_key == key.decode()
    assert raw.get(key) == b"1"


async def test_a_result_of_another_codec_is_an_error_and_not_a_run(face: Any, raw: Any, gate: Gate) -> None:
    # Given a done record whose result is not ours
    await (await face.claim("x", scope="s")).complete("ours")
    key = claims_of(gate).key("s", "x")[0]
    raw.set(key, raw.get(key)[:RESULT] + b"\x80\x04pickled")
    ran = []

    def body(k: str) -> None:
        ran.append(k)

    # When a duplicate comes, whatever it would do without a store
    for policy in ("raise", "run", "local"):
        with pytest.raises(ResultUnavailable, match="cannot be decoded"):
            await face.once(key="{k}", scope="s", on_store_error=policy)(body)("x")
    assert ran == []


@pytest.mark.parametrize("result", [[1, 2, 3], "text", ["two", "texts"], ("two", 2)])
@pytest.mark.damages("undecodable")
async def test_what_a_spoiled_byte_makes_a_failure_is_not_replayed_as_one(
    face: Any, gate: Gate, raw: Any, result: object
) -> None:
    # Given a done record whose first byte says by a flipped bit that its result is a failure
    await (await face.claim("x", scope="s")).complete(result)
    key = claims_of(gate).key("s", "x")[0]
    stored = bytearray(raw.get(key))
    stored[0] ^= 4
    raw.set(key, bytes(stored))
    assert (await face.inspect("x", scope="s")).kind == "e"
    # When a duplicate comes, Then its error says that this cannot be read
    with pytest.raises(ResultUnavailable, match="cannot be decoded"):
        await face.once(key="{k}", scope="s")(lambda k: pytest.fail("it ran"))("x")
    with pytest.raises(DecodeError):
        assert (await face.claim("x", scope="s")).result
