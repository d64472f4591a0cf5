"""Going through dead letters page by page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgpack
import pytest

from idemgate.core.codec import Codec
from idemgate.topics.dead_letters import PAGE, DeadFilter, DeadLetter, DeadPages, decode_dead_letter, position_of
from idemgate.topics.merge import merge_of
from idemgate.topics.message import Message
from tests.messages import pack_message


def test_a_reason_in_another_encoding_is_shown_all_the_same() -> None:
    packed = msgpack.packb([b"k", pack_message(), b"caf\xe9", 7, 1], use_bin_type=False)
    assert decode_dead_letter(0, b"1", packed, merge_of("last"), Codec()).reason == "caf\ufffd"


@pytest.mark.parametrize(
    ("chosen", "most", "size"),
    [
        (DeadFilter(), None, PAGE),
        (DeadFilter(), 7, 7),
        (DeadFilter(), PAGE + 1, PAGE),
        (DeadFilter(key="k*"), 7, PAGE),
        (DeadFilter(reason="no"), 7, PAGE),
    ],
)
def test_a_page_is_as_large_as_what_is_wanted_and_no_larger_than_a_script_may_show(
    chosen: DeadFilter, most: int | None, size: int
) -> None:
    assert DeadPages(chosen, most).size == size


def test_where_nothing_is_left_it_ends() -> None:
    pages = DeadPages(DeadFilter(), 7)
    assert pages.add_page((0, [])) == []
    assert (pages.at, pages.found) == (None, [])


def _letter(number: int) -> DeadLetter:
    at = datetime(2024, 1, 1, tzinfo=UTC) - timedelta(seconds=number)
    return DeadLetter(f"0-{number}", f"k{number}", "no", at, 1, 1, at, at, _MESSAGE)


_MESSAGE = Message(pack_message(attempts=1, failure=b"no"), merge_of("last"), Codec())


def test_it_goes_on_until_all_were_seen() -> None:
    pages = DeadPages(DeadFilter())
    # When a page shows some of all, then the next begins behind its last one
    assert len(pages.add_page((5, [_letter(1), _letter(2)]))) == 2
    assert pages.at == position_of(_letter(2))
    # And one that is not the first says by itself nothing of how many there are: others were deleted meanwhile
    assert len(pages.add_page((2, [_letter(3), _letter(4)]))) == 2
    assert pages.at == position_of(_letter(4))
    pages.add_page((2, []))
    assert pages.at is None


def test_a_first_page_with_all_of_them_is_the_only_one() -> None:
    pages = DeadPages(DeadFilter())
    pages.add_page((2, [_letter(1), _letter(2)]))
    assert pages.at is None


def test_as_many_as_were_wanted_are_found_and_no_more_are_asked_for() -> None:
    pages = DeadPages(DeadFilter(key="k[1-3]"), 2)
    assert pages.add_page((9, [_letter(7), _letter(1), _letter(8)])) == [_letter(1)]
    assert pages.at is not None
    pages.add_page((9, [_letter(2)]))
    assert (pages.at, pages.found) == (None, [_letter(1), _letter(2)])
    # A page is as large as what is still wanted
    some = DeadPages(DeadFilter(), 7)
    some.add_page((9, [_letter(n) for n in range(4)]))
    assert some.size == 3
