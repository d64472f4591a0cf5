"""A call for many keys: each gets its own reply, and the rest is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from idemgate.core.calls import Incomplete, PerKeyCall, run_plan, run_plan_async
from idemgate.errors import DecodeError, UnexpectedData
from idemgate.lua import script

KEYS = (b"a", b"b", b"c", b"d", b"e")


def call(keys: tuple[bytes, ...] = KEYS) -> PerKeyCall[int]:
    words = [b"now", b"common", *(word for key in keys for word in (b"owner of " + key, b"of " + key))]
    return PerKeyCall(script("guard/claim"), keys, words, lambda reply: int(reply[0]), 2)


def test_a_reply_that_is_none_of_ours_spoils_no_other() -> None:
    found = call().answer([[1], [b"foreign", 5, b"no"], [b"x"], 7, [5]])
    assert (found[0], found[4]) == (1, 5)
    assert isinstance(found[1], UnexpectedData)
    assert found[1].redis_key == "b"
    assert isinstance(found[2], DecodeError)
    assert isinstance(found[3], DecodeError)


def test_one_key_is_answered_without_an_array() -> None:
    assert call((b"a",)).answer([7]) == [7]


def test_what_is_left_is_asked_for_in_one_call() -> None:
    with pytest.raises(Incomplete) as found:
        call().answer([[1], [2]])
    rest = found.value.rest
    assert [one.keys for one in rest.calls] == [(b"c", b"d", b"e")]
    assert [list(one.args) for one in rest.calls] == [list(call((b"c", b"d", b"e")).args)]
    assert rest.join([[3, 4, 5]]) == [1, 2, 3, 4, 5]


def test_an_answer_about_no_key_is_none_of_ours() -> None:
    for reply in ([], 7, None):
        with pytest.raises(DecodeError):
            call().answer(reply)


@pytest.mark.parametrize("awaiting", [False, True])
def test_a_plan_whose_request_fails_has_ended_when_the_caller_gets_the_error(awaiting: bool) -> None:
    ended: list[str] = []

    def plan() -> Generator[str, str, None]:
        try:
            yield "request"
        finally:
            ended.append("plan")

    def fail(_: str) -> str:
        raise ConnectionError

    async def fail_later(_: str) -> str:
        raise ConnectionError

    try:
        asyncio.run(run_plan_async(plan(), fail_later)) if awaiting else run_plan(plan(), fail)
    except ConnectionError:  # whose traceback keeps the plan alive
        assert ended == ["plan"]
    else:
        pytest.fail("no error")
