"""The decorator `gate.merge`: a topic as a function that is triggered with its own arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from types import GenericAlias
from typing import Any, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast, get_args, get_origin

from idemgate.core.codec import Codec
from idemgate.core.codec.annotations import has_model
from idemgate.core.codec.decoding import unpack
from idemgate.core.codec.models import rebuild
from idemgate.core.codec.restoring import holds_stored
from idemgate.core.codec.state import StoredModel
from idemgate.core.codec.storable import has_other_class
from idemgate.core.durations import Duration
from idemgate.core.key_template import KeySpec, compile_key
from idemgate.core.keys import Key
from idemgate.core.pickling import PickledByName
from idemgate.core.scopes import scope_of
from idemgate.core.validation import check_function, is_async, type_hints
from idemgate.errors import DecodeError, InvalidArgument, PartialFailure
from idemgate.topics.merge import Merge, merge_of
from idemgate.topics.messages import Delivery, Receipt
from idemgate.topics.partial import to_list
from idemgate.topics.policy import TopicOptions
from idemgate.topics.topic import AioTopic, Topic

__all__ = ["AioMergedFunction", "MergedFunction", "TriggerOptions", "decorate_merge"]

P = ParamSpec("P")
R = TypeVar("R")


class TriggerOptions(TypedDict, total=False):
    """The options of one trigger; `Topic.trigger` documents them."""

    priority: int | None
    group: Key | None
    delay: Duration | None
    at: datetime | None
    version: int | None
    event_id: Key | None


class MergedFunction(PickledByName, Generic[P, R]):
    """A function behind a topic.

    Calling it calls the function directly. `trigger` takes the same arguments and lets a worker call the function
    later, once for all triggers of a window. `aio.trigger` does the same for asyncio. `topic` is the topic.
    """

    __wrapped__: Callable[P, R]

    def __init__(
        self,
        func: Callable[P, R],
        topic: Topic,
        key: KeySpec,
        signature: inspect.Signature,
        options: TriggerOptions | None = None,
        event_id: KeySpec | None = None,
        origin: MergedFunction[P, R] | None = None,
    ) -> None:
        functools.update_wrapper(self, func)
        self._init_finder()
        self.topic = topic
        self._func = func
        self._key = key
        self._signature = signature
        self._options: TriggerOptions = {} if options is None else options
        self._event_id = event_id
        self._origin = origin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let pickle store the name, as that of any function, and the options of `with_options`."""
        if self._origin is None:
            return super().__reduce_ex__(protocol)
        return _with_options, (self._origin, self._options)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._func(*args, **kwargs)

    def trigger(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Trigger a later call with these arguments. One round trip, atomic.

        Triggers of the same key are merged. `with_options` adds a priority, a delay and other options.

        Returns:
            The receipt.

        Raises:
            TypeError: The arguments do not fit the function.
            InvalidArgument: An argument cannot be stored.
        """
        return self.topic.trigger(*self._bind(args, kwargs), **self._options_of(args, kwargs))

    def with_options(self, **options: Unpack[TriggerOptions]) -> MergedFunction[P, R]:
        """Return the same function with options for its triggers: `f.with_options(delay="5s").trigger(item)`.

        Args:
            **options: `priority`, `group`, `delay`, `at`, `version` and `event_id`; see `Topic.trigger`.

        Raises:
            TypeError: An option is unknown.
        """
        if unknown := options.keys() - TriggerOptions.__annotations__.keys():
            raise TypeError(f"with_options() got an unexpected keyword argument {min(unknown)!r}")
        return self._copy(cast(TriggerOptions, {**self._options, **options}), self._event_id)

    def drop_copies(self, func: Callable[P, R], event_id: KeySpec, retention: int) -> MergedFunction[P, R]:
        """Return the same function, which drops copies of a trigger.

        Args:
            func: The guarded function, for direct calls.
            event_id: The key of `once`. It becomes the event id of each trigger.
            retention: How long the topic stores an event id, in ms.
        """
        self.topic.definition.set_dedup_retention(retention)
        return MergedFunction(func, self.topic, self._key, self._signature, self._options, event_id)

    @functools.cached_property
    def aio(self) -> AioMergedFunction[P, R]:
        """The same function for asyncio: `await f.aio.trigger(...)`."""
        return AioMergedFunction(self)

    def _copy(self, options: TriggerOptions, event_id: KeySpec | None) -> MergedFunction[P, R]:
        origin = self._origin or self
        return MergedFunction(self._func, self.topic, self._key, self._signature, options, event_id, origin)

    def _options_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TriggerOptions:
        if self._event_id is None or "event_id" in self._options:
            return self._options
        return {**self._options, "event_id": self._event_id.of(None, args, kwargs)}

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._key.of(None, args, kwargs), dict(bound.arguments)


class AioMergedFunction(Generic[P, R]):
    """A `MergedFunction` for asyncio."""

    def __init__(self, merged: MergedFunction[P, R]) -> None:
        self._merged = merged

    def __reduce__(self) -> Any:
        return getattr, (self._merged, "aio")

    @property
    def topic(self) -> AioTopic:
        """The topic for asyncio."""
        return self._merged.topic.aio

    async def trigger(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Trigger a later call with these arguments. See `MergedFunction.trigger`."""
        merged = self._merged
        return await self.topic.trigger(*merged._bind(args, kwargs), **merged._options_of(args, kwargs))

    def with_options(self, **options: Unpack[TriggerOptions]) -> AioMergedFunction[P, R]:
        """Return the same function with options for its triggers. See `MergedFunction.with_options`."""
        return self._merged.with_options(**options).aio


def _with_options(merged: MergedFunction[P, R], options: TriggerOptions) -> MergedFunction[P, R]:
    """Rebuild a function with options that was pickled."""
    return merged.with_options(**options)


def decorate_merge(
    make_topic: Callable[..., Topic],
    func: Callable[P, R],
    key: Any,
    name: str | None,
    options: TopicOptions,
    deliver: Callable[[Delivery[dict[str, Any]]], object] | None = None,
) -> MergedFunction[P, R]:
    """Create the topic of a function and register the handler that calls it, or `deliver`. Raises InvalidArgument."""
    check_function(func)
    signature = inspect.signature(func)
    merge = merge_of(options.get("merge", "last"))
    _check_function(func, signature, merge)
    compiled = compile_key(key, func)
    topic = make_topic(_topic_name(func) if name is None else name, **options)
    arguments = _Arguments(func, signature, merge)
    topic.handler(_build_handler(func, arguments, merge) if deliver is None else deliver)
    if arguments.has_models:
        topic.definition.set_check(arguments.build_check(topic.definition.context.codec))
    return MergedFunction(func, topic, compiled, signature)


def _check_function(func: Callable[..., Any], signature: inspect.Signature, merge: Merge) -> None:
    first = next(iter(signature.parameters), "")
    if first in ("self", "cls"):
        raise InvalidArgument(
            "function",
            func,
            "a method needs its object, which cannot be stored",
            "Use a function, or a topic with a handler",
        )
    if merge.op not in ("last", "first", "fields"):
        raise InvalidArgument(
            "merge",
            merge.op,
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
    name = scope_of(func, "name")
    if len(name) > 64 or "<" in name:
        raise InvalidArgument("name", name, "not a topic name", "Pass name=, 1 to 64 of A-Z a-z 0-9 _ . -")
    return name


class _Arguments:
    """The arguments of a merged function, from the payload of a delivery.

    Attributes:
        has_models: whether an annotation may lead to a model.
    """

    def __init__(self, func: Callable[..., Any], signature: inspect.Signature, merge: Merge) -> None:
        self._name = func.__qualname__ if hasattr(func, "__qualname__") else repr(func)
        self._signature = signature
        self._hints = _parameter_hints(func, signature)
        parameters = signature.parameters.items()
        self._unknown = {name for name, each in parameters if each.annotation is not each.empty} - self._hints.keys()
        # An argument without an item to retry is passed as an empty list.
        self._empty: dict[str, Any] = {name: [] for name, _ in parameters if merge.fields and merge.of(name).has_items}
        self.has_models = bool(self._unknown) or any(map(has_model, self._hints.values()))

    def bind(self, delivery: Delivery[Any]) -> inspect.BoundArguments:
        """Return the arguments. Raises DecodeError."""
        if not self.has_models:
            return inspect.BoundArguments(self._signature, self._empty | delivery.payload)
        found = {name: self._restore(name, value) for name, value in (self._empty | delivery._stored_payload).items()}
        return inspect.BoundArguments(self._signature, cast(Any, found))

    def build_check(self, codec: Codec) -> Callable[[Merge, bytes, Any], None]:
        """Return a check that raises InvalidArgument for a trigger whose arguments cannot be restored."""

        def check(merge: Merge, acc: bytes, given: Any) -> None:
            payload = merge.lower(acc if merge.raw else unpack(acc, "a payload"), codec.decode_stored)
            if not isinstance(payload, dict):
                fix = "Pass a dict of its arguments, or call its trigger()"
                raise InvalidArgument("payload", payload, f"{self._name} needs its arguments by name", fix)
            for name, value in cast("dict[str, Any]", payload).items():
                try:
                    restored = self._restore(name, value)
                except DecodeError as error:
                    raise self._refusal(name, value, error.why) from error
                # What a trigger holds in its stored form was checked when it was packed.
                if holds_stored(value) and has_other_class(restored, given.get(name)):
                    raise self._refusal(name, value, "it would come back as another class of the same name")

        return check

    def _refusal(self, name: str, value: Any, why: str) -> InvalidArgument:
        fix = "Annotate the parameter, or the field that holds it, with its class, or pass plain data"
        shown = value.name if isinstance(value, StoredModel) else cast(Any, type(value))
        return InvalidArgument(f"payload[{name!r}]", shown, f"{self._name} could not be called with it: {why}", fix)

    def _restore(self, name: str, value: Any) -> Any:
        if name in self._unknown and holds_stored(value):
            raise DecodeError(f"the annotation of {name!r} cannot be evaluated; import its names outside TYPE_CHECKING")
        return rebuild(value, self._hints.get(name))


def _parameter_hints(func: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return the annotations of the parameters. Those of `*args` and `**kwargs` are the tuple and the dict."""
    hints, found = type_hints(func), dict[str, Any]()
    for name, parameter in signature.parameters.items():
        if name not in hints:
            continue
        hint: Any = hints[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            hint = GenericAlias(tuple, (hint, ...))
        elif parameter.kind is parameter.VAR_KEYWORD:
            hint = get_args(hint)[0] if get_origin(hint) is Unpack else GenericAlias(dict, (str, hint))
        found[name] = hint
    return found


def _build_handler(func: Callable[..., Any], arguments_of: _Arguments, merge: Merge) -> Callable[[Delivery[Any]], Any]:
    bind = arguments_of.bind

    def call(delivery: Delivery[Any]) -> Any:
        arguments = bind(delivery)
        try:
            return _add_arguments(func(*arguments.args, **arguments.kwargs), delivery, merge)
        except PartialFailure as failed:
            raise _add_arguments(failed, delivery, merge) from failed.__cause__

    async def call_and_wait(delivery: Delivery[Any]) -> Any:
        arguments = bind(delivery)
        try:
            return _add_arguments(await cast(Any, func)(*arguments.args, **arguments.kwargs), delivery, merge)
        except PartialFailure as failed:
            raise _add_arguments(failed, delivery, merge) from failed.__cause__

    handler: Any = call_and_wait if is_async(func) else call
    handler.__module__, handler.__qualname__ = func.__module__, getattr(func, "__qualname__", "<lambda>")
    return handler  # type: ignore[no-any-return]


def _add_arguments(result: Any, delivery: Delivery[Any], merge: Merge) -> Any:
    """Add the arguments without items to a partial failure, because the retry needs all arguments."""
    if isinstance(result, PartialFailure) and merge.fields and (fields := to_list(result.items)):
        mapped = isinstance(result.items, Mapping)
        given = cast("Mapping[str, Any]", result.items) if mapped else dict.fromkeys(fields, ...)
        rest = {name: ... for name in delivery.payload if not merge.of(name).has_items}
        result.items = rest | dict(given) if any(given.values()) else {}
    return result
