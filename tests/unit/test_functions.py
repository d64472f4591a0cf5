"""What a function is called, however it is wrapped."""

from __future__ import annotations

from functools import partial
from typing import Any

from idemgate.core.scopes import qualified_name
from idemgate.core.validation import type_hints


class Handles:
    def __call__(self) -> None: ...

    def method(self) -> int:
        return 1


def plain(x: int) -> str:
    return str(x)


def test_a_function_is_called_by_its_module_and_qualified_name() -> None:
    def inner() -> None: ...

    assert qualified_name(plain) == f"{__name__}.plain"
    assert qualified_name(Handles().method) == f"{__name__}.Handles.method"
    here = f"{__name__}.test_a_function_is_called_by_its_module_and_qualified_name"
    assert qualified_name(inner) == f"{here}.inner"
    assert qualified_name(lambda: None) == f"{here}.lambda"


def test_what_wraps_a_function_is_called_as_the_function_is() -> None:
    assert qualified_name(partial(partial(plain), 1)) == f"{__name__}.plain"
    assert qualified_name(Handles()) == f"{__name__}.Handles"


def test_annotations_that_cannot_be_read_are_none() -> None:
    def odd(x: Any) -> None: ...

    odd.__annotations__ = {"x": "no such name"}
    assert type_hints(plain) == {"x": int, "return": str}
    assert type_hints(odd) == {}
