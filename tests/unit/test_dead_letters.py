"""Going through dead letters page by page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgpack
import pytest

from idemgate.core.codec import Codec
from idemgate.topics.dead_letters import (
    PAGE,
    DeadFilter,
    DeadLetter,
    DeadPage,
    DeadPages,
    DeadPosition,
    decode_dead_letter,
)
from idemgate.topics.merge import merge_of
from idemgate.topics.messages import Message
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
    assert pages.add_page(DeadPage([], None)) == []
    assert (pages.at, pages.found) == (None, [])


def _letter(number: int) -> DeadLetter:
    at = datetime(2024, 1, 1, tzinfo=UTC) - timedelta(seconds=number)
    return DeadLetter(f"0-{number}", f"k{number}", "no", at, 1, 1, at, at, _MESSAGE, b"")


_MESSAGE = Message(pack_message(attempts=1, failure=b"no"), merge_of("last"), Codec())


def test_the_next_page_begins_where_the_last_one_ended() -> None:
    pages, end = DeadPages(DeadFilter()), DeadPosition(7, "3")
    # Given a page that did not reach the end, with fewer letters than it examined
    assert len(pages.add_page(DeadPage([_letter(1), _letter(2)], end))) == 2
    assert pages.at == end
    # Then a page without a next position is the last one
    pages.add_page(DeadPage([_letter(4)], None))
    assert pages.at is None


def test_as_many_as_were_wanted_are_found_and_no_more_are_asked_for() -> None:
    pages = DeadPages(DeadFilter(key="k[1-3]"), 2)
    assert pages.add_page(DeadPage([_letter(7), _letter(1), _letter(8)], DeadPosition(7, "8"))) == [_letter(1)]
    assert pages.at is not None
    pages.add_page(DeadPage([_letter(2)], DeadPosition(7, "2")))
    assert (pages.at, pages.found) == (None, [_letter(1), _letter(2)])
    # A page is as large as what is still wanted
    some = DeadPages(DeadFilter(), 7)
    some.add_page(DeadPage([_letter(n) for n in range(4)], DeadPosition(7, "3")))
    assert some.size == 3


@pytest.mark.parametrize(
    ("key", "reason", "fragments"),
    [
        (None, None, (b"", b"", b"")),
        ("order-7", None, (b"order-7", b"1", b"")),
        ("order-*", "no", (b"order-", b"", b"no")),
        ("*7", None, (b"", b"", b"")),
        ("a\\xff", "\ufffd", (b"a", b"", b"")),
    ],
)
def test_a_filter_names_bytes_that_each_match_has(
    key: str | None, reason: str | None, fragments: tuple[bytes, bytes, bytes]
) -> None:
    assert DeadFilter(key, reason).fragments == fragments
