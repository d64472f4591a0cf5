"""The short form of a topic: a function that can be triggered with its own arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast

from idemgate.core.codec.models import rebuild
from idemgate.core.functions import awaited, hints_of, qualified_name, refuse_generator
from idemgate.core.key_template import KeySpec, compile_key
from idemgate.errors import InvalidArgument, PartialFailure
from idemgate.topics.merge import Merge, merge_of
from idemgate.topics.messages import Delivery, Receipt
from idemgate.topics.partial import listed
from idemgate.topics.policy import MergeOptions
from idemgate.topics.topic import AioTopic, Topic

__all__ = ["AioMerged", "Merged", "merged"]

P = ParamSpec("P")
R = TypeVar("R")


class Merged(Generic[P, R]):
    """A function behind a topic. Calling it calls the function; `trigger` takes the same arguments and lets a worker
    call it later, once for all triggers of a window. `aio.trigger` awaits; `topic` is the topic itself."""

    def __init__(self, func: Callable[P, R], topic: Topic, key: KeySpec, signature: inspect.Signature) -> None:
        functools.update_wrapper(self, func)
        self.topic = topic
        self._func = func
        self._key = key
        self._signature = signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._func(*args, **kwargs)

    def trigger(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Triggers a later call with these arguments (merged with others of the same key). TypeError if they do not
        fit, InvalidArgument if they cannot be stored; one round trip."""
        key, payload = self._bound(args, kwargs)
        return self.topic.trigger(key, payload)

    @functools.cached_property
    def aio(self) -> AioMerged[P, R]:
        """The awaiting face: `await f.aio.trigger(...)`."""
        return AioMerged(self)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._key.of(None, args, kwargs), dict(bound.arguments)


class AioMerged(Generic[P, R]):
    """The awaiting face of a `Merged` function."""

    def __init__(self, merged: Merged[P, R]) -> None:
        self._merged = merged

    @property
    def topic(self) -> AioTopic:
        return self._merged.topic.aio

    async def trigger(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """As `Merged.trigger`."""
        key, payload = self._merged._bound(args, kwargs)
        return await self.topic.trigger(key, payload)


def merged(
    make_topic: Callable[..., Topic], func: Callable[P, R], key: Any, name: str | None, options: MergeOptions
) -> Merged[P, R]:
    """Makes the topic of a function and registers the handler that calls it."""
    refuse_generator(func)
    signature = inspect.signature(func)
    merge = merge_of(options.get("merge", "last"))
    _check(func, signature, merge)
    compiled = compile_key(key, func)
    topic = make_topic(_topic_name(func) if name is None else name, **options)
    topic.handler(_handler(func, signature, merge))
    return Merged(func, topic, compiled, signature)


def _check(func: Callable[..., Any], signature: inspect.Signature, merge: Merge) -> None:
    first = next(iter(signature.parameters), "")
    if first in ("self", "cls"):
        raise InvalidArgument(
            "function",
            func,
            "a method needs its object, which cannot be stored",
            "Use a function, or a topic with a handler",
        )
    op = merge.spec["op"]
    if op not in ("last", "first", "fields"):
        raise InvalidArgument(
            "merge",
            op,
            "would not leave the arguments of a call",
            'Use "last", "first", or a dict of argument -> policy',
        )
    unknown = sorted(merge.fields.keys() - signature.parameters.keys())
    if unknown:
        raise InvalidArgument(
            "merge",
            unknown[0],
            "not an argument of the function",
            f"It has {', '.join(signature.parameters)}",
        )


def _topic_name(func: Callable[..., Any]) -> str:
    name = qualified_name(func)
    if len(name) > 64 or "<" in name:
        raise InvalidArgument("name", name, "not a topic name", "Pass name=, 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


def _handler(func: Callable[..., Any], signature: inspect.Signature, merge: Merge) -> Callable[[Delivery[Any]], Any]:
    hints = hints_of(func)
    # An argument of which no item is to be tried again comes back empty.
    empty: dict[str, Any] = {name: [] for name in signature.parameters if merge.fields and merge.of(name).itemized}

    def bound(delivery: Delivery[Any]) -> inspect.BoundArguments:
        arguments = {name: rebuild(value, hints.get(name)) for name, value in (empty | delivery.payload).items()}
        return inspect.BoundArguments(signature, arguments)

    def call(delivery: Delivery[Any]) -> Any:
        arguments = bound(delivery)
        try:
            return _complete(func(*arguments.args, **arguments.kwargs), delivery, merge)
        except PartialFailure as failed:
            raise _complete(failed, delivery, merge) from failed.__cause__

    async def call_and_wait(delivery: Delivery[Any]) -> Any:
        arguments = bound(delivery)
        try:
            return _complete(await cast(Any, func)(*arguments.args, **arguments.kwargs), delivery, merge)
        except PartialFailure as failed:
            raise _complete(failed, delivery, merge) from failed.__cause__

    return call_and_wait if awaited(func) else call


def _complete(result: Any, delivery: Delivery[Any], merge: Merge) -> Any:
    """A call needs all of its arguments: with the items that failed go the arguments that keep none."""
    if isinstance(result, PartialFailure) and merge.fields and (fields := listed(result.items)):
        mapped = isinstance(result.items, Mapping)
        given = cast("Mapping[str, Any]", result.items) if mapped else dict.fromkeys(fields, ...)
        rest = {name: ... for name in delivery.payload if not merge.of(name).itemized}
        result.items = rest | dict(given) if any(given.values()) else {}
    return result
