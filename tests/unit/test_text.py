"""The text of an exception that is stored or logged."""

from __future__ import annotations

import pytest

from idemgate.core.codec.models import rebuild
from idemgate.core.text import last_line, message_of
from idemgate.errors import DecodeError


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Picky:
    @classmethod
    def model_validate(cls, value: object) -> Picky:
        raise Unspeakable


TEXT = "<str() of this Unspeakable raised RuntimeError>"


def test_an_exception_whose_str_raises_has_a_text_all_the_same() -> None:
    assert message_of(ValueError("why")) == "why"
    assert message_of(Unspeakable()) == TEXT
    assert last_line(Unspeakable()).endswith(f"Unspeakable: {TEXT}")


def test_a_model_that_raises_such_an_exception_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match=r"does not fit Picky: <str\(\) of this Unspeakable"):
        rebuild({}, Picky)
