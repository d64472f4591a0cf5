"""Going through dead letters page by page."""

from __future__ import annotations

import pytest

from idemgate.core.letters import PAGE, Chosen, Pages


@pytest.mark.parametrize(
    ("chosen", "most", "size"),
    [
        (Chosen(), None, PAGE),
        (Chosen(), 7, 7),
        (Chosen(), PAGE + 1, PAGE),
        (Chosen(key="k*"), 7, PAGE),
        (Chosen(reason="no"), 7, PAGE),
    ],
)
def test_a_page_is_as_large_as_what_is_wanted_and_no_larger_than_a_script_may_show(
    chosen: Chosen, most: int | None, size: int
) -> None:
    assert Pages(chosen, most).size == size


def test_where_nothing_is_left_it_ends() -> None:
    pages = Pages(Chosen(), 7)
    assert pages.turn((0, [])) == []
    assert (pages.at, pages.found) == (None, [])
