"""Validate the options of `once` and `claim` before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast, get_args

from idemgate.core.codec import Codec, digest
from idemgate.core.codec.annotations import has_model
from idemgate.core.codec.storable import find_unstorable
from idemgate.core.durations import Duration, lease_milliseconds, milliseconds
from idemgate.core.key_template import compile_fingerprint, compile_key
from idemgate.core.keys import Key, check_scope
from idemgate.core.scopes import scope_of
from idemgate.core.validation import (
    check_function,
    check_int,
    check_iterable,
    is_async,
    type_hints,
)
from idemgate.errors import InvalidArgument
from idemgate.guard.attempt import (
    ClaimAttempt,
    ErrorPolicy,
    OnceOptions,
    OnDone,
    OnError,
    OnInProgress,
    OnLeaseLoss,
    OnLost,
    OnMissingKey,
    OnReplay,
    OnStoreError,
)
from idemgate.guard.claims import Claims
from idemgate.guard.current import get_current
from idemgate.guard.decorator import GuardedFunction
from idemgate.guard.driver import Driver
from idemgate.guard.heartbeat import register_scope
from idemgate.guard.sink.driver import SinkDriver
from idemgate.guard.sink.protocol import AioSink, Sink
from idemgate.guard.sink.refusals import check_flavour, check_sink
from idemgate.store.context import Context

if TYPE_CHECKING:
    import tenacity


__all__ = [
    "ClaimOptions",
    "GuardOptions",
    "NoSkipOptions",
    "build_driver",
    "check_choice",
    "claim_attempt",
    "claim_attempts",
    "decorate",
    "once_options",
    "split_bare",
]

P = ParamSpec("P")
R = TypeVar("R")


class ClaimOptions(TypedDict, total=False):
    """The options of `gate.claim` and `gate.claim_many`."""

    scope: str
    """Keys of one scope share their record; a decorator may have the same scope. Default: "claim"."""
    lease: Duration
    """The length of the lease without a renewal. Default: 30 seconds."""
    retention: Duration
    """The time that a key stays done. Default: 24 hours."""
    on_lease_loss: OnLeaseLoss
    """The rule for the next caller after a lost lease: "retry" (default) or "hold"."""
    max_attempts: int | None
    """The starts without success before AttemptsExhausted. Default: None, any number."""
    max_run: Duration | None
    """The time after which a block renews its lease no more. Default: None, any time."""


def _claim_options(codec: Codec, options: ClaimOptions) -> OnceOptions:
    """Validate the options of a claim. Raise InvalidArgument."""
    if unknown := options.keys() - ClaimOptions.__annotations__.keys():
        raise TypeError(f"claim() got an unexpected keyword argument {min(unknown)!r}")
    given = {name: value for name, value in options.items() if name != "scope"}
    return once_options(
        codec, "claim", options.get("scope", "claim"), cast(GuardOptions, {**given, "on_in_progress": "wait"})
    )


def _register(context: Context, options: OnceOptions) -> None:
    if context.registered_scopes.get(options.scope, -1) < options.retention:
        register_scope(context, options.scope, options.retention)


def claim_attempt(context: Context, key: Key, fingerprint: object, options: ClaimOptions) -> ClaimAttempt:
    """Build the attempt to claim one key. Raise InvalidArgument."""
    checked_options = _claim_options(context.codec, options)
    _register(context, checked_options)
    return ClaimAttempt(checked_options, Claims(context.namespace, context.clock), key, _digest(fingerprint))


def claim_attempts(context: Context, keys: Iterable[Key], options: ClaimOptions) -> list[ClaimAttempt]:
    """Build the attempts to claim many keys. Raise InvalidArgument, which names the index of a bad key."""
    checked_options, claims = _claim_options(context.codec, options), Claims(context.namespace, context.clock)
    _register(context, checked_options)
    attempts: list[ClaimAttempt] = []
    for key in check_iterable(keys, "keys", "Pass a list of keys"):
        try:
            attempts.append(ClaimAttempt(checked_options, claims, key, b""))
        except InvalidArgument as error:
            raise InvalidArgument(f"keys[{len(attempts)}]", error.value, error.problem, error.fix) from None
    return attempts


def _digest(fingerprint: object) -> bytes:
    return b"" if fingerprint is None else digest(fingerprint, name="fingerprint")


class _CommonOptions(TypedDict, total=False):
    """The options that have no influence on the type of a call."""

    retention: Duration
    lease: Duration
    wait: Duration
    on_error: ErrorPolicy
    on_lease_loss: OnLeaseLoss
    on_lost: OnLost
    on_store_error: OnStoreError
    on_replay: OnReplay | None
    max_attempts: int | None
    retry: tenacity.BaseRetrying | None
    max_run: Duration | None
    max_result_bytes: int | None
    cache_size: int
    shadow: bool
    sink: Sink | AioSink | None


class GuardOptions(_CommonOptions, total=False):
    """The options of `gate.once` and `gate.guard`; `Gate.once` documents them."""

    on_done: OnDone | None
    on_in_progress: OnInProgress
    on_missing_key: OnMissingKey
    at_most_once: bool


class NoSkipOptions(_CommonOptions, total=False):
    """The options with which a call returns what the function returned, and never None instead."""

    on_done: Literal["replay", "raise"] | None
    on_in_progress: Literal["raise", "wait"]
    on_missing_key: Literal["raise", "run"]
    at_most_once: Literal[False]


_CHOICES = {
    "on_in_progress": OnInProgress,
    "on_lease_loss": OnLeaseLoss,
    "on_lost": OnLost,
    "on_store_error": OnStoreError,
    "on_missing_key": OnMissingKey,
}


def once_options(codec: Codec, caller: str, scope: str | None, options: GuardOptions) -> OnceOptions:
    """Validate the options of `once` or `guard`, the `caller`. Raise InvalidArgument for the first invalid one.

    `decorate` fills in a missing `scope` and `returns` for each function.
    """
    if unknown := options.keys() - GuardOptions.__annotations__.keys():
        raise TypeError(f"{caller}() got an unexpected keyword argument {min(unknown)!r}")
    for name, choices in _CHOICES.items():
        check_choice(name, options.get(name, get_args(choices)[0]), choices)
    on_done, on_error = options.get("on_done"), options.get("on_error", "release")
    if on_done is not None:
        check_choice("on_done", on_done, OnDone)
    if not callable(on_error):
        check_choice("on_error", on_error, OnError)
    if scope is not None:
        check_scope(scope)
    if (retry := options.get("retry")) is not None:
        _check_retry(retry)
    at_most_once, shadow = (_check_switch(name, options.get(name, False)) for name in ("at_most_once", "shadow"))
    if at_most_once:
        _check_at_most_once(options)
    if (sink := options.get("sink")) is not None:
        check_sink(sink, options)
    max_attempts, max_result_bytes = options.get("max_attempts"), options.get("max_result_bytes")
    return OnceOptions(
        scope=scope or "",
        retention=milliseconds(options.get("retention", "24h"), "retention"),
        lease=lease_milliseconds(options.get("lease", "30s")),
        on_done=on_done or ("skip" if at_most_once else "replay"),
        on_in_progress=options.get("on_in_progress", "raise"),
        on_error=on_error,
        on_lease_loss=options.get("on_lease_loss", "retry"),
        on_lost=options.get("on_lost", "return"),
        on_store_error=options.get("on_store_error", "raise"),
        on_missing_key=options.get("on_missing_key", "raise"),
        on_replay=_check_hook(options.get("on_replay")),
        max_attempts=0 if max_attempts is None else check_int("max_attempts", max_attempts, 1),
        at_most_once=at_most_once,
        max_run=0 if (max_run := options.get("max_run")) is None else milliseconds(max_run, "max_run"),
        wait=milliseconds(options.get("wait", "30s"), "wait"),
        shadow=shadow,
        codec=codec if max_result_bytes is None else _result_codec(max_result_bytes),
        returns=None,
        sink=sink,
    )


def _result_codec(max_result_bytes: int) -> Codec:
    return Codec(check_int("max_result_bytes", max_result_bytes), limit_name="max_result_bytes=")


def split_bare(
    caller: str, bare: tuple[object, ...], key: str | Callable[..., object] | None
) -> tuple[Any, str | Callable[..., object] | None]:
    """Return the function of a decorator without parentheses, or None, and the key.

    Raises:
        InvalidArgument: the positional arguments are neither one function nor one template.
    """
    if not bare:
        return None, key
    first, *more = bare
    if more or key is not None:
        raise TypeError(f"{caller}() takes one positional argument: its key, or the function without parentheses")
    if first is None or isinstance(first, str):
        return None, first
    if getattr(first, "__name__", "") == "<lambda>":
        raise InvalidArgument("key", first, "a function was passed by position", "Write key=lambda ...")
    return first, None


def build_driver(context: Context, checked_options: OnceOptions, options: GuardOptions) -> Driver:
    """Return the driver of a guard. Raise InvalidArgument for an invalid `cache_size`."""
    cache_size = check_int("cache_size", options.get("cache_size", 0), 0)
    driver = Driver if checked_options.sink is None else SinkDriver
    retry = options.get("retry")
    return driver(context, checked_options, None if retry is None else _stop_at_lost_lease(retry), cache_size)


def _stop_at_lost_lease(retry: tenacity.BaseRetrying) -> tenacity.BaseRetrying:
    """Return a copy of a policy that starts no attempt once the lease is known to be lost. It raises LeaseLost then."""
    before: Callable[[Any], Any] | None = retry.before

    def check_lease(state: object) -> Any:
        if (execution := get_current()) is not None:
            execution.check_lease()
        return None if before is None else before(state)

    async def check_lease_async(state: object) -> None:
        await check_lease(state)

    return retry.copy(before=check_lease_async if is_async(before) else check_lease)


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
    driver = build_driver(context, named_options, options)
    if not checked_options.scope:  # last: a refused decoration has no scope
        spec = context.default_scopes.add(scope, inner, spec)
    guarded = GuardedFunction(driver, spec, fingerprint_spec)
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


def _check_retry(retry: object) -> None:
    """Raise InvalidArgument if `retry` is no tenacity policy."""
    import tenacity  # imported late because few decorators have a policy

    if not isinstance(retry, tenacity.BaseRetrying):
        raise InvalidArgument(
            "retry", retry, "not a tenacity policy", "Pass tenacity.Retrying(stop=..., wait=..., reraise=True)"
        )


def _check_sync(retry: tenacity.BaseRetrying, func: Callable[..., object]) -> None:
    """Raise InvalidArgument if an async retry policy meets a blocking function."""
    import tenacity

    if isinstance(retry, tenacity.AsyncRetrying) and not is_async(func):
        raise InvalidArgument("retry", retry, "an async policy on a blocking function", "Pass tenacity.Retrying(...)")


def _check_at_most_once(options: GuardOptions) -> None:
    """Raise InvalidArgument for an option that has no meaning with `at_most_once`."""
    for name in ("on_error", "on_lease_loss", "on_lost", "max_attempts", "max_run", "retry"):
        default = {"on_error": "release", "on_lease_loss": "retry", "on_lost": "return"}.get(name)
        if (value := options.get(name, default)) != default:
            raise InvalidArgument(
                name,
                value,
                "no effect with at_most_once, because the key is done before the work starts",
                f"Drop {name}",
            )
    if (on_done := options.get("on_done")) == "replay":
        raise InvalidArgument("on_done", on_done, "at_most_once stores no result to replay", "Use 'skip' or 'raise'")


def _check_switch(name: str, value: object) -> bool:
    """Return a switch. Raise InvalidArgument if it is no bool: the text "false" of a setting would turn it on."""
    if not isinstance(value, bool):
        raise InvalidArgument(name, value, "not a bool", "Pass True or False")
    return value


def _check_hook(hook: OnReplay | None) -> OnReplay | None:
    """Return `on_replay`. Raise InvalidArgument if it is no plain function."""
    if hook is not None and (not callable(hook) or is_async(hook)):
        raise InvalidArgument("on_replay", hook, "not a plain function", "Pass a function of a key and a verdict")
    return hook


def check_choice(name: str, value: object, literal: Any) -> None:
    """Raise InvalidArgument if the value is none of the choices."""
    allowed = get_args(literal)
    if value not in allowed:
        raise InvalidArgument(name, value, "unknown choice", f"Use one of {', '.join(map(repr, allowed))}")
