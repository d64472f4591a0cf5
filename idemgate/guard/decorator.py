"""The decorated function: its key, its fingerprint, and what it does without a key."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from inspect import isbuiltin
from pickle import PicklingError
from types import CellType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

from idemgate.core.calls import Plan, run_plan, run_plan_async
from idemgate.core.codec.annotations import has_model
from idemgate.core.codec.storable import find_unstorable
from idemgate.core.key_template import FingerprintSpec, KeySpec, compile_fingerprint, compile_key
from idemgate.core.keys import Key, record
from idemgate.core.scopes import qualified_name, scope_of
from idemgate.core.validation import (
    ENDED,
    call_async,
    check_blocking,
    check_function,
    is_async,
    refuse_unfinished,
    type_hints,
)  # fmt: skip
from idemgate.core.verdict import HANDLED, Verdict, judge_error
from idemgate.errors import InvalidArgument, MissingKey
from idemgate.guard.call import COUNTER_NAMES, run, run_async, run_without_key, run_without_key_async, runs_without_key
from idemgate.guard.claim_calls import Record
from idemgate.guard.context import DoneCache, GuardContext, build_guard_context
from idemgate.guard.judge import judge
from idemgate.guard.keep import Keep, run_kept, run_kept_async
from idemgate.guard.manage import forget, inspect
from idemgate.guard.options import GuardOptions, OnceOptions
from idemgate.guard.request import Account, Duplicate, Request
from idemgate.guard.sink.refusals import check_flavour
from idemgate.store.context import Context

if TYPE_CHECKING:
    import tenacity

__all__ = ["GuardedFunction", "OnceFunction", "build_judge", "build_judge_async", "decorate", "once_function"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class OnceFunction(Protocol[P, R_co]):
    """A function decorated with `once`. Its methods take the arguments of a call, and find the key of that call."""

    __name__: str
    __qualname__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @property
    def scope(self) -> str:
        """The scope of the keys, for `gate.inspect(key, scope=charge.scope)`."""
        ...

    def key(self, *args: P.args, **kwargs: P.kwargs) -> Key:
        """Return the key of a call. Sends nothing to the store. Raises MissingKey and InvalidArgument, as the call."""
        ...

    @overload
    def inspect(  # type: ignore[overload-overlap]
        self: OnceFunction[P, Coroutine[Any, Any, object]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, Record]: ...
    @overload
    def inspect(self, *args: P.args, **kwargs: P.kwargs) -> Record:
        """Return the stored record of a call's key; see `Gate.inspect`. A coroutine if the function is async."""
        ...

    @overload
    def verdict(
        self: OnceFunction[P, Coroutine[Any, Any, R]], *args: Any, keep: Keep | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, Verdict[R]]: ...
    @overload
    def verdict(self, *args: Any, keep: Callable[[float], object] | None = None, **kwargs: Any) -> Verdict[R_co]:
        """Call the function and return the verdict on the call instead of raising. A coroutine if it is async.

        Args:
            *args, **kwargs: the arguments of the call. Pass one that the function calls `keep` by position.
            keep: see `Guard.run`.

        Returns:
            The verdict. An error of the key is "rejected".

        Raises:
            InvalidArgument: `keep` is no function, or a coroutine function and the function is not.
        """
        ...

    @overload
    def forget(  # type: ignore[overload-overlap]
        self: OnceFunction[P, Coroutine[Any, Any, object]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, bool]: ...
    @overload
    def forget(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Delete the record of a call's key, so that the next call runs. A coroutine if the function is async.

        Returns:
            False if there was no record.

        Raises:
            AlreadyInProgress: an owner's lease is valid. `gate.forget(..., force=True)` deletes it anyway.
        """
        ...


class _KeyMethods:
    """The methods of `OnceFunction` that a wrapper adds to its function, bound or not."""

    @property
    def __closure__(self) -> tuple[CellType, ...]:
        """The closure of the function, and the guard, which refuses to be pickled.

        Because a wrapper has the class of its function, cloudpickle would copy the function without its guard.
        """
        closure = cast("tuple[CellType, ...] | None", self.__wrapped__.__closure__)  # type: ignore[attr-defined]
        return *(closure or ()), CellType(_require_guard(self)[0])

    @property
    def scope(self) -> str:
        return _require_guard(self)[0].options.scope

    def key(self, /, *args: Any, **kwargs: Any) -> Key:
        guard, instance = _require_guard(self)
        return guard.key.of(instance, args, kwargs)

    def verdict(self, /, *args: Any, keep: Keep | None = None, **kwargs: Any) -> Any:
        guard, wrapped, instance = _guard_of(self)
        assert guard is not None
        if is_async(wrapped):
            if keep is not None:
                check_function(keep, "keep")
            return guard.judge_call_async(wrapped, instance, args, kwargs, keep)
        if keep is not None:
            check_blocking(keep, "keep", "Pass a plain function, or decorate a coroutine function")
        return guard.judge_call(wrapped, instance, args, kwargs, keep)

    def inspect(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(lambda guard, key: inspect(guard.guard.context, key, guard.options.scope), args, kwargs)

    def forget(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(lambda guard, key: forget(guard.guard.context, key, guard.options.scope, False), args, kwargs)

    def _run(self, build: Callable[[GuardedFunction, Key], Plan[Any]], args: Any, kwargs: Any) -> Any:
        """Run a plan about the key of a call. Return a coroutine if the function is async."""
        guard, instance = _require_guard(self)
        plan, context = build(guard, guard.key.of(instance, args, kwargs)), guard.guard.context
        if is_async(self.__wrapped__):  # type: ignore[attr-defined]
            return run_plan_async(plan, context.aio_link.run_all)
        return run_plan(plan, context.link.run_all)


@functools.cache
def _wrapper_class() -> Any:
    """Return the class of guarded functions. Pickle and copy treat its objects as functions: by their name."""
    import wrapt  # it scans entry points, which takes longer than importing this package

    untyped: Any = wrapt

    class BoundGuarded(_KeyMethods, untyped.BoundFunctionWrapper):  # type: ignore[misc]
        def __reduce_ex__(self, _protocol: object) -> Any:
            owner = getattr(self.__wrapped__, "__self__", None)  # None for a staticmethod, and for Shop.pay
            if owner is None:
                path = self.__qualname__.split(".")[:-1]
                owner = functools.reduce(getattr, path, sys.modules[self.__module__])
            return getattr, (owner, self.__name__)

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, _memo: object) -> Any:
            return self

    class Guarded(_KeyMethods, untyped.FunctionWrapper):  # type: ignore[misc]
        __bound_function_wrapper__ = BoundGuarded

        def __reduce_ex__(self, _protocol: object) -> str:
            if type(self.__wrapped__) in (classmethod, staticmethod):  # cloudpickle copies the class
                self._self_guard.__reduce__()
            return str(self.__qualname__)

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, _memo: object) -> Any:
            return self

    return Guarded


class GuardedFunction:
    """One decorated function: its key, its fingerprint, and what its calls share."""

    def __init__(self, guard: GuardContext, key: KeySpec, fingerprint: FingerprintSpec | None) -> None:
        self.guard = guard
        self.key = key
        self.fingerprint = fingerprint
        self.options: OnceOptions = guard.options
        self.cache: DoneCache | None = guard.cache

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            f"cannot pickle the guarded function of scope {self.options.scope!r} by value: the copy would have "
            f"no guard. Define it in a module that the other process imports (a static method below @staticmethod), "
            f"or call gate.guard(...).run(key, function, ...) in the other process"
        )

    def wrap(self, func: Any) -> Any:
        """Return the guarded function. Its signature, name and kind stay as they are."""
        inner = getattr(func, "__func__", func)
        wrapped: Any = _wrapper_class()(func, self.call_async if is_async(inner) else self.call)
        wrapped._self_guard = self
        return wrapped

    def call(self, wrapped: Callable[..., R], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Guard one blocking call."""
        try:
            key = self.key.of(instance, args, kwargs)
        except MissingKey as error:
            return wrapped(*args, **kwargs) if runs_without_key(self.guard, error) else None  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        fingerprint = b"" if self.fingerprint is None else self.fingerprint.of(instance, args, kwargs)
        if self.cache is not None and (shared := self._lookup_shared(self.cache, key, fingerprint)) is not None:
            return shared.value  # type: ignore[no-any-return]
        request = Request(self.options, self.guard.claims, key, fingerprint)
        return _unwrap(run(self.guard, request, wrapped, args, kwargs))  # type: ignore[no-any-return]

    async def call_async(
        self,
        wrapped: Callable[..., Awaitable[R]],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """Guard one async call."""
        try:
            key = self.key.of(instance, args, kwargs)
        except MissingKey as error:
            return await wrapped(*args, **kwargs) if runs_without_key(self.guard, error) else None  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        fingerprint = b"" if self.fingerprint is None else self.fingerprint.of(instance, args, kwargs)
        if self.cache is not None and (shared := self._lookup_shared(self.cache, key, fingerprint)) is not None:
            return shared.value  # type: ignore[no-any-return]
        request = Request(self.options, self.guard.claims, key, fingerprint)
        return _unwrap(await run_async(self.guard, request, wrapped, args, kwargs))  # type: ignore[no-any-return]

    def _lookup_shared(self, cache: DoneCache, key: Key, fingerprint: bytes) -> Duplicate | None:
        """Return the cached answer that all duplicates share, or None.

        This runs before the objects of the call are built, because it is the fastest path.
        """
        options = self.options
        cached = cache.lookup(record(self.guard.context.namespace, options.scope, key), fingerprint)
        if cached is None or cached.shared_result is None or options.shadow or options.on_replay is not None:
            return None
        self.guard.context.counters.add_each("once.remembered", COUNTER_NAMES[cached.reply.state])
        return cached.shared_result

    # Verdicts, for consumers

    def judge_call(
        self,
        wrapped: Callable[..., R],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: Callable[[float], object] | None = None,
    ) -> Verdict[R]:
        """Guard one blocking call and return its verdict."""
        request = self._find_request(instance, args, kwargs)
        if isinstance(request, Verdict):
            return request
        if keep is not None:
            return run_kept(self.guard, request, keep, wrapped, args, kwargs)
        if isinstance(request, MissingKey):
            return run_without_key(self.guard, request, wrapped, args, kwargs)
        return judge(request, run(self.guard, request, wrapped, args, kwargs))

    async def judge_call_async(
        self,
        wrapped: Callable[..., Awaitable[R]],
        instance: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: Keep | None = None,
    ) -> Verdict[R]:
        """Guard one async call and return its verdict."""
        request = self._find_request(instance, args, kwargs)
        if isinstance(request, Verdict):
            return request
        if keep is not None:
            return await run_kept_async(self.guard, request, keep, wrapped, args, kwargs)
        if isinstance(request, MissingKey):
            return await run_without_key_async(self.guard, request, wrapped, args, kwargs)
        return judge(request, await run_async(self.guard, request, wrapped, args, kwargs))

    def _find_request(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Request | MissingKey | Verdict[Any]:
        """Return the request of a call. Without a key return the error, and without a valid one the verdict."""
        try:
            key = self.key.of(instance, args, kwargs)
            fingerprint = b"" if self.fingerprint is None else self.fingerprint.of(instance, args, kwargs)
            return Request(self.options, self.guard.claims, key, fingerprint)
        except MissingKey as error:
            return error
        except Exception as error:  # noqa: BLE001 - a key callable may raise anything, and would raise it again
            return Verdict("rejected", None, error)


def _unwrap(account: Account) -> Any:
    """Return the value of a call, or raise its error with the context that it had."""
    if (error := account[1]) is None:
        return account[0]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # `raise` has set the exception that the caller is handling
        del account, error, context  # the traceback refers to this frame


def decorate(
    context: Context,
    checked_options: OnceOptions,
    func: Callable[P, R],
    key: str | Callable[..., object] | None,
    fingerprint: Sequence[str] | Callable[..., object] | None,
    options: GuardOptions,
) -> Callable[P, R]:
    """Return the guarded function.

    Raises:
        InvalidArgument: the function returns before its work ends. Or it has no unique name and there is no scope. Or
            it lacks fields of the `key`.
    """
    inner = getattr(func, "__func__", func)
    check_function(inner)
    if (retry := options.get("retry")) is not None:
        _check_sync(retry, inner)
    if checked_options.sink is not None:
        check_flavour(checked_options.sink, inner)
    scope, returns = checked_options.scope or scope_of(inner), type_hints(inner).get("return")
    _check_storable(checked_options, returns, inner)
    spec, fingerprint_spec = compile_key(key, inner), compile_fingerprint(fingerprint, inner)
    named_options = dataclasses.replace(checked_options, scope=scope, returns=returns if has_model(returns) else None)
    guard = build_guard_context(context, named_options, options)
    if not checked_options.scope:  # last: a refused decoration has no scope
        spec = context.default_scopes.add(scope, inner, spec)
    guarded = GuardedFunction(guard, spec, fingerprint_spec)
    return cast("Callable[P, R]", guarded.wrap(func))


def _check_storable(checked_options: OnceOptions, returns: object, func: Callable[..., object]) -> None:
    """Raise InvalidArgument if duplicates replay what the function returns, and its annotation cannot be stored."""
    if checked_options.on_done != "replay" or hasattr(func, "__wrapped__"):
        return  # `functools.wraps` copies an annotation that need not be true
    if (unstorable := find_unstorable(returns)) is None:
        return
    name = getattr(unstorable, "__qualname__", unstorable)
    raise InvalidArgument(
        "function", getattr(func, "__qualname__", func), f"returns {name}, which cannot be stored for its duplicates",
        "Return plain data, a dataclass or a pydantic model, or pass on_done='skip' or 'raise'",
    )  # fmt: skip


def _check_sync(retry: tenacity.BaseRetrying, func: Callable[..., object]) -> None:
    """Raise InvalidArgument if an async retry policy meets a blocking function."""
    import tenacity

    if isinstance(retry, tenacity.AsyncRetrying) and not is_async(func):
        raise InvalidArgument("retry", retry, "an async policy on a blocking function", "Pass tenacity.Retrying(...)")


def build_judge(func: Callable[..., Any]) -> Callable[..., Verdict[Any]]:
    """Return a function that calls a blocking one with a message, and returns the verdict instead of raising.

    The verdict on a guarded function is that of its guard, so a duplicate is "duplicate" and not "handled". For any
    other function the verdict follows from what it raised.
    """
    if isinstance(func, functools.partial):
        judge, given, named = build_judge(func.func), func.args, func.keywords
        return lambda *message, **more: judge(*given, *message, **{**named, **more})
    guard, wrapped, instance = _guard_of(func)
    if guard is not None:
        return lambda *message, **named: guard.judge_call(wrapped, instance, message, named)

    def call(*message: object) -> Verdict[Any]:
        try:
            value = func(*message)
            if value.__class__ not in ENDED and not hasattr(value, "__await__"):  # a subscriber awaits it
                refuse_unfinished(value)
        except Exception as error:  # noqa: BLE001 - the verdict has it
            return judge_error(error)
        return HANDLED if value is None else Verdict("handled", value, ran=True)

    return call


def build_judge_async(func: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Verdict[Any]]]:
    """Return an async function that calls another one with a message, and returns the verdict; see `build_judge`."""
    if isinstance(func, functools.partial):
        judge, given, named = build_judge_async(func.func), func.args, func.keywords
        return lambda *message, **more: judge(*given, *message, **{**named, **more})
    guard, wrapped, instance = _guard_of(func)
    if guard is not None:
        return lambda *message, **named: guard.judge_call_async(wrapped, instance, message, named)

    async def call(*message: object) -> Verdict[Any]:
        try:
            value = await call_async(func, message, {})
        except Exception as error:  # noqa: BLE001 - the verdict has it
            return judge_error(error)
        return HANDLED if value is None else Verdict("handled", value, ran=True)

    return call


def is_guarded(func: Callable[..., Any]) -> bool:
    """Return True if a function, or what a partial of it calls, is decorated with `once`."""
    while isinstance(func, functools.partial):
        func = func.func
    return _guard_of(func)[0] is not None


def _guard_of(func: Any) -> tuple[GuardedFunction | None, Any, Any]:
    """Return the guard of a function, what it wraps and the object of a bound method. Without a guard all are None.

    A decorator above `once` copies or forwards the attributes of a guarded function, but it has work of its own.
    """
    if not issubclass(type(func), _KeyMethods):
        return None, None, None
    parent = getattr(func, "_self_parent", None)  # a bound method has its own wrapper
    guard = (func if parent is None else parent)._self_guard
    wrapped = func.__wrapped__
    return guard, wrapped, None if isbuiltin(wrapped) else getattr(wrapped, "__self__", None)


def _require_guard(func: Any) -> tuple[GuardedFunction, Any]:
    """Return the guard of a function and the object of a bound method. Raise InvalidArgument if it has no guard."""
    guard, _, instance = _guard_of(func)
    if guard is None:
        raise InvalidArgument("function", qualified_name(func), "not decorated with once", "Pass a guarded function")
    return guard, instance


def once_function(func: Callable[P, R]) -> OnceFunction[P, R]:
    """Return a guarded method, for type checkers with its `inspect`, `forget`, `key` and `scope`.

    A type checker sees a method decorated with `once` as a method only: `once_function(shop.pay).inspect("order-7")`.

    Raises:
        InvalidArgument: the function is not decorated with `once`.
    """
    _require_guard(func)
    return cast("OnceFunction[P, R]", func)
