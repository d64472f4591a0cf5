"""Replies as stored results. That of a duplicate has the bytes of the first one: what a model hides stays hidden."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, cast

from faststream import Response, StreamMessage
from faststream._internal.parser import DefaultCodec

from idemgate import InvalidArgument
from idemgate.core.codec import Codec
from idemgate.core.codec.storable import refuse_unfinished_inside

__all__ = ["pack_reply", "unpack_reply"]

_KIND = "faststream.Response"
"""The name of the class of a stored `Response`; None for another reply that is stored in a dict."""
_IS_JSON = "faststream.json"
"""Says that the body, a str, is published as JSON."""
_NOT_STORED = object()
"""A value that the guard cannot store, so that the key is done without a result."""
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


async def pack_reply(reply: Any, subscriber: Any) -> Any:
    """Return what a handler returned as a value to store. Unfinished work is left to the guard, which refuses it.

    A body that is not plain, such as a model, is stored as the plain value that FastStream publishes as the same bytes.
    """
    body = reply.body if isinstance(reply, Response) else reply
    try:
        refuse_unfinished_inside(body)
    except InvalidArgument:
        return body
    try:
        is_json = False
        if not _is_plain(body):
            body, is_json = await _find_plain(body, subscriber._outer_config.broker_config)
        packed: dict[str, Any] = {_KIND: None}
        if isinstance(reply, Response):
            packed = {_KIND: type(reply).__name__, **_find_options(reply)}
        elif not is_json and not (isinstance(body, dict) and _KIND in body):
            return cast("Any", body)
    except Exception:  # noqa: BLE001 - of the user's encoder: the effect has happened, and FastStream will raise it
        return _NOT_STORED
    return {**packed, "body": body, **({_IS_JSON: True} if is_json else {})}


def unpack_reply(stored: Any) -> Any:
    """Return the reply of a stored result. One of an unknown class keeps its body, headers and correlation id."""
    if not isinstance(stored, dict) or _KIND not in stored:
        return cast("Any", stored)
    options = cast("dict[str, Any]", stored).copy()
    name, body = options.pop(_KIND), options.pop("body")
    if options.pop(_IS_JSON, False):
        body = _make_json_text(body)
    if name is None:
        return body
    kind = next((one for one in _subclasses(Response) if one.__name__ == name), Response)
    response = _make_blank(kind)
    vars(response).update({**options, "body": body})
    return response


def _make_blank(kind: type[Response]) -> Response:
    """Return a response with what its class sets; without that if the constructor takes more than a body."""
    try:
        return kind(None)
    except Exception:  # noqa: BLE001 - a class of the user
        return kind.__new__(kind)


def _is_plain(value: Any) -> bool:
    """Return whether a value is stored and published as it is. Subclasses of plain types may be published otherwise."""
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


async def _find_plain(body: Any, config: Any) -> tuple[Any, bool]:
    """Return the plain value that is published as the same bytes, and whether that is a str as JSON.

    Raises:
        ValueError: there is none.
        Exception: FastStream cannot encode the body.
    """
    codec: Any = config.broker_codec or DefaultCodec()
    serializer = config.fd_config._serializer
    encoded = await codec.encode(body, serializer)
    value = await codec.decode(StreamMessage(None, encoded[0], content_type=encoded[1]))
    if _is_plain(value):
        if await codec.encode(value, serializer) == encoded:
            return value, False
        if isinstance(value, str) and await codec.encode(_make_json_text(value), serializer) == encoded:
            return value, True
    raise ValueError


def _make_json_text(text: str) -> Any:
    """Return a value that FastStream publishes as a str of JSON, as it does a date or an enum. A str becomes text."""
    make_enum: Any = Enum
    return make_enum("Text", {"TEXT": text}).TEXT


def _find_options(response: Response) -> dict[str, Any]:
    """Return the attributes of a response that its class does not set. Raise an error if they cannot be stored."""
    usual = vars(_make_blank(type(response)))
    options = {
        name: value
        for name, value in vars(response).items()
        if name != "body" and value != usual.get(name, _NOT_STORED)
    }
    if (codec := Codec()).decode(codec.encode(options)) != options:  # such as a schedule of NATS
        raise ValueError
    return options


def _subclasses(kind: type[Response]) -> Iterator[type[Response]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
