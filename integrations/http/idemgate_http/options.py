"""The options of all faces, checked once before the first request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast, get_args

from idemgate import Duration, Gate, InvalidArgument
from idemgate.types import check_function, check_gate, milliseconds
from idemgate_http.problems import BASE
from idemgate_http.request import Request
from idemgate_http.response import NEVER_KEPT, REPLAYABLE, Response
from idemgate_http.webhooks.event import Source

__all__ = ["AsgiOptions", "Caller", "HttpOptions", "Options", "ShieldOptions", "check_options"]

Caller = Callable[[Request], object]
"""A function that returns who sends the request: text, an int or a UUID. 7 and "7" are two callers.

None, "" and a KeyError mean unknown.
"""
OnInProgress = Literal["raise", "wait"]
OnStoreError = Literal["raise", "run", "local"]
_RETRYABLE = frozenset({408, 425, 429})
"""Client errors that ask the client to send the same request again."""


class HttpOptions(TypedDict, total=False):
    """The options of every face. The README has them in a table."""

    caller: Caller | None
    """Who sends the request: `caller(request)` returns text, an int or a UUID. Required, or `single_tenant`."""
    single_tenant: bool
    """True: all clients may see each other's responses, so there is no `caller`. Default: False."""
    source: Source | None
    """A webhook source, such as `webhooks.Stripe(secret)`: the id of its event is the key."""
    applies_to: Callable[[Request], bool] | None
    """The requests that are guarded, of those with one of the `methods`. Default: None, all."""
    methods: Collection[str]
    """The methods that are guarded. Default: POST and PATCH."""
    required: bool | Callable[[Request], bool]
    """Whether a request without the header is refused with 400. Default: False, it runs unguarded."""
    scope: str
    """The scope of the keys in the store. Default: "http"."""
    retention: Duration
    """How long a response is kept for retries. Default: 24 hours."""
    lease: Duration
    """How long a request that lost its server blocks its key. Heartbeats renew it. Default: 30 seconds."""
    keep_statuses: Iterable[int]
    """Client errors (4xx) that are kept, too. 2xx and 3xx always are. Default: none."""
    keep_headers: Iterable[str]
    """Response headers that are kept beside the default ones. Default: none."""
    fingerprint: Callable[[Request, bytes], object] | None
    """What identifies the payload, of the request. Default: query string, media type, Content-Encoding and body."""
    redact: Callable[[Response], Response] | None
    """A function that returns what is stored of a response. The first client gets the original. Default: None."""
    max_body_bytes: int
    """The largest body of a guarded request; a larger one gets 413. Default: 1 MiB."""
    max_response_bytes: int
    """The largest body of a response that is kept. Default: 256 KiB."""
    on_in_progress: OnInProgress
    """For a copy of a running request: "raise" (409, the default) or "wait" for its response, for `wait` at most."""
    wait: Duration
    """How long a copy waits. Default: 10 seconds."""
    on_store_error: OnStoreError
    """While the store is away: "raise" (503, the default), "run" unguarded, or "local", guarded in this process."""
    on_lease_loss: Literal["retry", "hold"]
    """After a server vanished inside a request: "retry" (default), or "hold" the key for `gate.resolve`."""
    max_attempts: int | None
    """The starts of a key without a kept response before it is refused. Default: None, any number."""
    max_run: Duration | None
    """How long a request may hold its key. Default: None, as long as it runs."""
    retry_after: Duration
    """The Retry-After of 409 and 503, in whole seconds. Default: 1 second."""
    problem_base: str
    """The prefix of the `type` of problems, such as "https://api.example/problems/". Default: a URN."""


class ShieldOptions(HttpOptions, total=False):
    """The options of a face that is async."""

    shield: bool
    """True: a client that disconnects does not cancel a guarded handler. Default: True."""


class AsgiOptions(ShieldOptions, total=False):
    """The options of `IdempotencyKey`."""

    grace: Duration
    """How long a shutdown waits for guarded handlers whose client has gone. Default: 10 seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options. Durations are in seconds."""

    gate: Gate
    caller: Caller | None
    source: Source | None
    applies_to: Callable[[Request], bool] | None
    methods: frozenset[str]
    required: bool | Callable[[Request], bool]
    statuses: frozenset[int]
    headers: frozenset[str]
    fingerprint: Callable[[Request, bytes], object] | None
    redact: Callable[[Response], Response] | None
    max_body_bytes: int
    max_response_bytes: int
    retry_after: int
    problem_base: str
    shield: bool
    grace: float
    guard: dict[str, Any]
    """The options of `gate.guard`, with its scope."""


def check_options(gate: Gate, options: HttpOptions, kind: type) -> Options:
    """Return the checked options of a face.

    Args:
        gate: the gate whose store keeps the responses.
        options: the options as they were passed.
        kind: the TypedDict of the options that the face has.

    Raises:
        InvalidArgument: an option is invalid, or it is not said who the callers are.
        TypeError: the face has no option of this name.
    """
    given = cast("AsgiOptions", options)
    check_gate(gate)
    names = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", ())} or kind.__annotations__
    if unknown := given.keys() - names:
        raise TypeError(f"unexpected option {min(unknown)!r}")
    source, caller = given.get("source"), given.get("caller")
    _check_caller(caller, given.get("single_tenant", False), source)
    for name in ("applies_to", "fingerprint", "redact"):
        _check_optional(name, given.get(name))
    required = given.get("required", False)
    if not isinstance(required, bool):
        _check_plain("required", required)
    return Options(
        gate=gate,
        caller=caller,
        source=source,
        applies_to=given.get("applies_to"),
        methods=_check_methods(given.get("methods", ("POST", "PATCH"))),
        required=required,
        statuses=_check_statuses(given.get("keep_statuses", ())),
        headers=_check_headers(given.get("keep_headers", ())),
        fingerprint=given.get("fingerprint"),
        redact=given.get("redact"),
        max_body_bytes=_check_size("max_body_bytes", given.get("max_body_bytes", 1 << 20)),
        max_response_bytes=_check_size("max_response_bytes", given.get("max_response_bytes", 1 << 18)),
        retry_after=max(1, -(-milliseconds(given.get("retry_after", "1s"), "retry_after") // 1000)),
        problem_base=_check_text("problem_base", given.get("problem_base", BASE)),
        shield=_check_bool("shield", given.get("shield", True)),
        grace=milliseconds(given.get("grace", "10s"), "grace", zero=True) / 1000,
        guard=_guard_options(given),
    )


_GUARD_OPTIONS = ("lease", "on_lease_loss", "max_attempts", "max_run", "retention")


def _guard_options(given: AsgiOptions) -> dict[str, Any]:
    """Return the options that the guard checks and applies."""
    for name, choices in (("on_in_progress", OnInProgress), ("on_store_error", OnStoreError)):
        if (value := given.get(name, "raise")) not in get_args(choices):
            known = ", ".join(map(repr, get_args(choices)))
            raise InvalidArgument(name, value, "unknown choice", f"Use one of {known}")
    options = {name: value for name, value in given.items() if name in _GUARD_OPTIONS}
    return options | {
        "scope": given.get("scope", "http"),
        "wait": given.get("wait", "10s"),
        "on_in_progress": given.get("on_in_progress", "raise"),
        "on_store_error": given.get("on_store_error", "raise"),
    }


def _check_caller(caller: object, single_tenant: object, source: object) -> None:
    """Raise InvalidArgument unless exactly one option says who the callers are."""
    _check_bool("single_tenant", single_tenant)
    if source is not None and not isinstance(source, Source):
        raise InvalidArgument("source", source, "not a webhook source", "Pass one of idemgate_http.webhooks")
    signed = isinstance(source, Source) and source.signed
    fix = "Pass caller=lambda request: ..., or single_tenant=True if all clients may see each other's responses"
    if signed and (caller is not None or single_tenant):
        raise InvalidArgument("source", source, "signed events have no caller", "Leave out caller and single_tenant")
    if caller is not None and single_tenant:
        raise InvalidArgument("caller", caller, "single_tenant=True says that there are no callers", fix)
    if caller is None and not single_tenant and not signed:
        raise InvalidArgument("caller", caller, "it is not said who sends a request", fix)
    _check_optional("caller", caller)


def _check_optional(name: str, value: object) -> None:
    if value is not None:
        _check_plain(name, value)


def _check_plain(name: str, value: object) -> None:
    """Raise InvalidArgument for what is no plain function. An async one would return a coroutine for each request."""
    if callable(value):
        check_function(value, name)
    if not callable(value) or inspect.iscoroutinefunction(value):
        raise InvalidArgument(name, value, "not a plain function", "Pass a function that returns without awaiting")


def _check_methods(given: object) -> frozenset[str]:
    methods = _check_words("methods", given, 'Pass ("POST", "PATCH")')
    for method in methods:
        if not method.isascii() or not method.isalpha() or method != method.upper() or method in _SAFE:
            raise InvalidArgument("methods", method, "not a method that is guarded", "Use POST, PATCH, PUT or DELETE")
    if not methods:
        raise InvalidArgument("methods", given, "there is none", 'Pass ("POST", "PATCH")')
    return methods


_SAFE = ("GET", "HEAD", "OPTIONS", "TRACE", "CONNECT")


def _check_statuses(given: object) -> frozenset[int]:
    kept = set(range(200, 400))
    for status in _iterate("keep_statuses", given, "Pass client errors such as (404, 409)"):
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status < 500 or status in _RETRYABLE:
            problem = "a response that says nothing final" if status in _RETRYABLE else "not a status that can be kept"
            raise InvalidArgument("keep_statuses", status, problem, "Name 4xx statuses except 408, 425 and 429")
        kept.add(status)
    return frozenset(kept)


def _check_headers(given: object) -> frozenset[str]:
    names = {name.lower() for name in _check_words("keep_headers", given, 'Pass names such as ["x-request-cost"]')}
    if refused := names & NEVER_KEPT:
        problem = "carries a credential, or belongs to one connection"
        raise InvalidArgument("keep_headers", min(refused), problem, "Leave it out; it is never replayed")
    return REPLAYABLE | names


def _check_words(name: str, given: object, fix: str) -> frozenset[str]:
    words = list(_iterate(name, given, fix))
    for word in words:
        _check_text(name, word)
    return frozenset(map(str, words))


def _iterate(name: str, given: object, fix: str) -> Iterable[object]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidArgument(name, given, "not a list", fix)
    return given  # pyright: ignore[reportUnknownVariableType]


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable():
        raise InvalidArgument(name, value, "not printable ASCII", "Pass text")
    return value


def _check_size(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise InvalidArgument(name, value, f"not a number of bytes up to {_LARGEST}", "Pass an int")
    return value


_LARGEST = 64 << 20
"""Bytes. Bodies are held in memory, and a value in Redis blocks its server while it is copied."""


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(name, value, "not a bool", "Pass True or False")
    return value
