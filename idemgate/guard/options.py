"""The options of `once`, `guard` and `claim`, validated before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, get_args

from idemgate.core.codec import Codec
from idemgate.core.durations import Duration, lease_milliseconds, milliseconds
from idemgate.core.history import check_history
from idemgate.core.keys import check_scope
from idemgate.core.validation import check_int, is_async
from idemgate.core.verdict import Verdict
from idemgate.errors import InvalidArgument
from idemgate.guard.sink.protocol import AioSink, Sink
from idemgate.guard.sink.refusals import check_sink

if TYPE_CHECKING:
    import tenacity

__all__ = [
    "ClaimOptions", "ErrorPolicy", "GuardOptions", "NoSkipOptions", "OnDone", "OnError", "OnInProgress", "OnLeaseLoss",
    "OnLost", "OnMissingKey", "OnReplay", "OnStoreError", "OnceOptions", "check_choice", "claim_options",
    "once_options", "split_bare",
]  # fmt: skip

OnDone = Literal["replay", "skip", "raise"]
OnInProgress = Literal["raise", "skip", "wait"]
OnError = Literal["release", "keep", "store", "share", "complete"]
OnLeaseLoss = Literal["retry", "hold"]
OnStoreError = Literal["raise", "run", "local"]
OnLost = Literal["return", "raise"]
OnMissingKey = Literal["raise", "run", "skip"]
OnReplay = Callable[[str, "Verdict[Any]"], object]
"""A function that gets the key and the verdict on each duplicate of a done key."""
ErrorPolicy = OnError | Callable[[BaseException], OnError]


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """The validated options of one decorator.

    Times are in ms. `max_run` is 0 for no limit. `wait` is None if a call does not wait for another owner. `returns`
    is the return annotation if it may lead to a model. `history` is 0 if only what is unusual is noted.
    """

    scope: str
    retention: int
    lease: int
    on_done: OnDone
    on_in_progress: OnInProgress
    on_error: ErrorPolicy
    on_lease_loss: OnLeaseLoss
    on_lost: OnLost
    on_store_error: OnStoreError
    on_missing_key: OnMissingKey
    on_replay: OnReplay | None
    max_attempts: int
    at_most_once: bool
    max_run: int
    wait: int | None
    shadow: bool
    codec: Codec
    returns: object
    sink: Sink | AioSink | None
    history: int

    @property
    def holds_interrupted(self) -> bool:
        """True if an interruption of the work leaves the key to `gate.resolve`. With a sink the transaction decides."""
        return self.on_lease_loss == "hold" and self.sink is None


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
    history: int | None
    """The transitions of all kinds to keep; see `Gate.once`. Default: None, what is unusual."""


def claim_options(codec: Codec, options: ClaimOptions) -> OnceOptions:
    """Validate the options of a claim. Raise InvalidArgument."""
    if unknown := options.keys() - ClaimOptions.__annotations__.keys():
        raise TypeError(f"claim() got an unexpected keyword argument {min(unknown)!r}")
    given = {name: value for name, value in options.items() if name != "scope"}
    return once_options(
        codec, "claim", options.get("scope", "claim"), cast(GuardOptions, {**given, "on_in_progress": "wait"})
    )


class _CommonOptions(TypedDict, total=False):
    """The options that have no influence on the type of a call."""

    # What counts as the same call
    retention: Duration
    # What a duplicate gets
    wait: Duration
    on_replay: OnReplay | None
    cache_size: int
    max_result_bytes: int | None
    shadow: bool
    # What happens after a failure
    on_error: ErrorPolicy
    retry: tenacity.BaseRetrying | None
    max_attempts: int | None
    # What happens when a lease or the store is lost
    lease: Duration
    max_run: Duration | None
    on_lease_loss: OnLeaseLoss
    on_lost: OnLost
    on_store_error: OnStoreError
    sink: Sink | AioSink | None
    # What the history of the scope keeps
    history: int | None


class GuardOptions(_CommonOptions, total=False):
    """The options of `gate.once` and `gate.guard`; `Gate.once` documents them."""

    on_missing_key: OnMissingKey
    on_done: OnDone | None
    on_in_progress: OnInProgress
    at_most_once: bool


class NoSkipOptions(_CommonOptions, total=False):
    """The options with which a call returns what the function returned, and never None instead."""

    on_missing_key: Literal["raise", "run"]
    on_done: Literal["replay", "raise"] | None
    on_in_progress: Literal["raise", "wait"]
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
        if name in options:
            check_choice(name, options.get(name), choices)
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
        wait=_parse_wait(options, shadow),
        shadow=shadow,
        codec=codec if max_result_bytes is None else _result_codec(max_result_bytes),
        returns=None,
        sink=sink,
        history=0 if (history := options.get("history")) is None else check_history(history),
    )


def _parse_wait(options: GuardOptions, shadow: bool) -> int | None:
    """Return how long a call waits for another owner, in ms, or None. A call in shadow mode runs at once."""
    wait = milliseconds(options.get("wait", "30s"), "wait")
    return wait if options.get("on_in_progress") == "wait" and not shadow else None


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


def _check_retry(retry: object) -> None:
    """Raise InvalidArgument if `retry` is no tenacity policy."""
    import tenacity  # imported late because few decorators have a policy

    if not isinstance(retry, tenacity.BaseRetrying):
        raise InvalidArgument(
            "retry", retry, "not a tenacity policy", "Pass tenacity.Retrying(stop=..., wait=..., reraise=True)"
        )


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
