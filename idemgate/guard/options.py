"""The options of `once`, checked when the decorator is made: what can never work is refused before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, cast, get_args

from idemgate.core.codec import Codec, digest
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.functions import awaited, hints_of, qualified_name, refuse_generator
from idemgate.core.key_template import compile_fingerprint, compile_key
from idemgate.core.keys import Key, check_scope
from idemgate.core.numbers import whole
from idemgate.core.validation import each
from idemgate.errors import InvalidArgument
from idemgate.guard.attempt import (
    ErrorPolicy,
    Guard,
    OnDone,
    OnError,
    OnInProgress,
    OnLeaseLoss,
    OnStoreError,
    Passage,
)
from idemgate.guard.calls import Claims
from idemgate.guard.decorator import Guarded
from idemgate.store.context import Context

if TYPE_CHECKING:
    import tenacity


__all__ = ["ClaimOptions", "attempt_of", "attempts_of", "decorate", "guard_of"]

P = ParamSpec("P")
R = TypeVar("R")


class ClaimOptions(TypedDict, total=False):
    """The options of `gate.claim` and `gate.claim_many`."""

    scope: str
    """Keys of one scope are the same work; a decorator with the same scope guards the same keys. Default: "claim"."""
    lease: Duration
    """How long the right to run holds without a renewal. Default: 30 seconds."""
    retention: Duration
    """How long a done key is known. Default: 24 hours."""
    on_lease_loss: OnLeaseLoss
    """What the next caller may do when an owner vanished: "retry" (default) or "hold"."""
    max_attempts: int | None
    """Starts without success before AttemptsExhausted. Default: None, any number."""


def claim_guard(codec: Codec, options: ClaimOptions) -> Guard:
    """Return the checked options of a claim. Raises InvalidArgument."""
    if unknown := options.keys() - ClaimOptions.__annotations__.keys():
        raise TypeError(f"claim() got an unexpected keyword argument {min(unknown)!r}")
    return guard_of(
        codec, options.get("scope", "claim"), options.get("retention", "24h"), options.get("lease", "30s"), "replay",
        "wait", "30s", "release", options.get("on_lease_loss", "retry"), "raise", options.get("max_attempts"), None,
        False, None, False,
    )  # fmt: skip


def attempt_of(context: Context, key: Key, fingerprint: object, options: ClaimOptions) -> Passage:
    """Return the attempt to claim one key. Raises InvalidArgument."""
    guard = claim_guard(context.codec, options)
    return Passage(guard, Claims(context.namespace, context.clock), key, _digest(fingerprint))


def attempts_of(context: Context, keys: Iterable[Key], options: ClaimOptions) -> list[Passage]:
    """Return the attempts to claim many keys. Raises InvalidArgument, which names the place of a bad key."""
    guard, claims = claim_guard(context.codec, options), Claims(context.namespace, context.clock)
    attempts: list[Passage] = []
    for key in each(keys, "keys", "Pass a list of keys"):
        try:
            attempts.append(Passage(guard, claims, key, b""))
        except InvalidArgument as error:
            raise InvalidArgument(f"keys[{len(attempts)}]", error.value, error.problem, error.fix) from None
    return attempts


def _digest(fingerprint: object) -> bytes:
    return b"" if fingerprint is None else digest(fingerprint, name="fingerprint")


def guard_of(
    codec: Codec,
    scope: str | None,
    retention: Duration,
    lease: Duration,
    on_done: OnDone | None,
    on_in_progress: OnInProgress,
    wait: Duration,
    on_error: ErrorPolicy,
    on_lease_loss: OnLeaseLoss,
    on_store_error: OnStoreError,
    max_attempts: int | None,
    retry: tenacity.BaseRetrying | None,
    at_most_once: bool,
    max_result_bytes: int | None,
    shadow: bool,
) -> Guard:
    """The checked options, or InvalidArgument naming the first that is wrong. `scope` and `returns` are filled in for each
    function."""
    _one_of("on_in_progress", on_in_progress, OnInProgress)
    _one_of("on_lease_loss", on_lease_loss, OnLeaseLoss)
    _one_of("on_store_error", on_store_error, OnStoreError)
    if on_done is not None:
        _one_of("on_done", on_done, OnDone)
    if not callable(on_error):
        _one_of("on_error", on_error, OnError)
    if scope is not None:
        check_scope(scope)
    if retry is not None:
        _check_retry(retry)
    if at_most_once:
        _check_at_most_once(on_done, on_error, on_lease_loss, max_attempts, retry)
    return Guard(
        scope=scope or "",
        retention=milliseconds(retention, "retention"),
        lease=milliseconds(lease, "lease"),
        on_done=on_done or ("skip" if at_most_once else "replay"),
        on_in_progress=on_in_progress,
        on_error=on_error,
        on_lease_loss=on_lease_loss,
        on_store_error=on_store_error,
        max_attempts=0 if max_attempts is None else whole("max_attempts", max_attempts, 1),
        at_most_once=at_most_once,
        wait=milliseconds(wait, "wait"),
        shadow=shadow,
        codec=codec if max_result_bytes is None else Codec(whole("max_result_bytes", max_result_bytes, 1)),
        returns=None,
    )


def decorate(
    context: Context,
    guard: Guard,
    func: Callable[P, R],
    key: str | Callable[..., object] | None,
    fingerprint: Sequence[str] | Callable[..., object] | None,
    retry: tenacity.BaseRetrying | None,
    remember: int,
) -> Callable[P, R]:
    """The function behind its guard; InvalidArgument if it is a generator or does not have the fields that `key` names."""
    inner = getattr(func, "__func__", func)
    if not callable(inner):
        raise InvalidArgument(
            "function", func, "not callable", "Decorate a function, as in @once(...): with parentheses"
        )
    refuse_generator(inner)
    if retry is not None:
        _check_flavour(retry, inner)
    guard = dataclasses.replace(
        guard, scope=guard.scope or qualified_name(inner), returns=hints_of(inner).get("return")
    )
    guarded = Guarded(
        context,
        guard,
        compile_key(key, inner),
        compile_fingerprint(fingerprint, inner),
        retry,
        whole("remember", remember, 0),
    )
    return cast("Callable[P, R]", guarded.wrap(func))


def _check_retry(retry: object) -> None:
    import tenacity  # of those who decorate, few have one

    if not isinstance(retry, tenacity.BaseRetrying):
        raise InvalidArgument(
            "retry", retry, "not a tenacity policy", "Pass tenacity.Retrying(stop=..., wait=..., reraise=True)"
        )


def _check_flavour(retry: tenacity.BaseRetrying, func: Callable[..., object]) -> None:
    import tenacity

    if isinstance(retry, tenacity.AsyncRetrying) and not awaited(func):
        raise InvalidArgument("retry", retry, "awaits, and the function does not", "Pass tenacity.Retrying(...)")


def _check_at_most_once(
    on_done: object, on_error: object, on_lease_loss: object, max_attempts: object, retry: object
) -> None:
    for name, value, default in (
        ("on_error", on_error, "release"),
        ("on_lease_loss", on_lease_loss, "retry"),
        ("max_attempts", max_attempts, None),
        ("retry", retry, None),
    ):
        if value != default:
            raise InvalidArgument(
                name,
                value,
                "has no meaning with at_most_once: the key is done before the work starts",
                f"Drop {name}",
            )
    if on_done == "replay":
        raise InvalidArgument("on_done", on_done, "at_most_once stores no result to replay", "Use 'skip' or 'raise'")


def _one_of(name: str, value: object, literal: Any) -> None:
    allowed = get_args(literal)
    if value not in allowed:
        raise InvalidArgument(name, value, "no such choice", f"Use one of {', '.join(map(repr, allowed))}")
