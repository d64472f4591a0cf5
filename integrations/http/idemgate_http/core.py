"""The decisions of all faces: which requests are guarded, with which key, what is kept, and what a verdict becomes."""

from __future__ import annotations

import logging
import math
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from idemgate import Gate, Guard, InvalidArgument, KeyReused, OutcomeUnknown, StoreError, Verdict
from idemgate.core.counters import Counters
from idemgate.core.text import event_log, one_line
from idemgate.errors import AttemptsExhausted, LeaseLost
from idemgate_http.keys import Identity, parse_key, record_key, tag_caller
from idemgate_http.options import HttpOptions, Options, check_options
from idemgate_http.problems import build_problem
from idemgate_http.request import Request, spell_media_type
from idemgate_http.response import (
    DIGESTS,
    HEADER_BYTES,
    Response,
    has_wrong_length,
    may_keep,
    pack,
    pack_not_kept,
    unpack,
)
from idemgate_http.webhooks.event import BadSignature

__all__ = ["GUARDED", "MARK", "MISSING", "PASSED", "Admission", "HttpGuard", "Released", "RequiredKeyMissing",
           "Selected", "Unrendered", "is_verified", "log_facts"]  # fmt: skip

log: logging.Logger = event_log("idemgate.http")
HEADER: Final = "idempotency-key"
MARK: Final = "idemgate_http"
"""The entry of an ASGI scope or a WSGI environ that says that a middleware has seen the request."""
PASSED: Final = "passed"
MISSING: Final = "missing"
"""The mark of a request that was passed on without the header, and needs it."""
GUARDED: Final = "guarded"
"""A guard inside of another one passes its requests on. With the same scope of keys it would find each in progress.
The mark of a guard with a source has the name of the source behind it."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
STREAMED: Final = "streamed"
UNRENDERED: Final = "unrendered"
UNREADABLE: Final = "unreadable"
TOO_LARGE: Final = "too large"


class Released(Exception):
    """Raised inside the guard to release the claim: the response is not of a kept status, or the app failed.

    It is private. The response or the error of the app reaches the client as without the guard.
    """


class Unrendered(Exception):
    """Raised inside the guard to keep the claim: the framework renders the response after the view has returned."""


class RequiredKeyMissing(Exception):
    """Raised by a dependency or a view that needs the header. The middleware answers with the 400 problem."""


class Selected(NamedTuple):
    """A request to guard. `key` is the value of the header, and "" if a webhook's body has the key."""

    request: Request
    caller: Identity
    key: str


class Admission(NamedTuple):
    """A request whose body was read: the key of its record, and its fingerprint."""

    request: Request
    key: str
    fingerprint: object


class HttpGuard:
    """The decisions of one middleware or decorator. It sends nothing itself; a face runs `guard`."""

    def __init__(self, gate: Gate, given: HttpOptions, kind: type) -> None:
        self.options: Options = check_options(gate, given, kind)
        most = self.options.max_response_bytes + 2 * HEADER_BYTES
        self.guard: Guard = gate.guard(**self.options.guard, max_result_bytes=most, on_error=_on_error)
        self.counters: Counters = gate.counters
        self.unrendered: set[object] = set[object]()
        """The ends of claims whose responses are not rendered yet."""
        source = self.options.source
        self.mark: str = GUARDED if source is None else f"{GUARDED}:{source.name}"

    def passes(self, method: str, mark: object) -> bool:
        """Return True for a request that is not for this guard, by its method and the mark of an outer guard.

        A source verifies every method that may change something, and also what a guard by header has let in. Otherwise
        a forged event with that header would reach the app.
        """
        if self.options.source is not None:
            return method.upper() in SAFE_METHODS or mark == self.mark
        return method.upper() not in self.options.methods or str(mark).startswith(GUARDED)

    # Before the body is read

    def select(self, request: Request) -> Selected | Response | None:
        """Decide about a request with one of the `methods`.

        Return None to pass it on untouched, or the response that refuses it. Otherwise the face reads the body.
        """
        options = self.options
        if options.applies_to is not None and not options.applies_to(request):
            return None
        field = request.headers.get(HEADER)
        if options.source is None and field is None:
            required = options.required if isinstance(options.required, bool) else options.required(request)
            return self.refuse("key-missing") if required else None
        key = "" if options.source is not None else parse_key(field or "")
        if key is None:
            return self.refuse("key-malformed")
        if (caller := self._identify(request)) is None:
            return self.refuse("caller-unknown")
        length = request.content_length
        if length is not None and length > options.max_body_bytes:
            return self.refuse("body-too-large")
        return Selected(request, caller, key)

    def _identify(self, request: Request) -> Identity | None:
        """Return the caller, or None if it is unknown."""
        if self.options.caller is None:
            return ""
        try:
            caller = self.options.caller(request)
        except KeyError:
            return None
        if caller is None or caller == "":
            return None
        if not isinstance(caller, str | int | UUID) or isinstance(caller, bool):
            fix = "Return text, an int or a UUID that is unique to the client, such as request.user.pk"
            raise InvalidArgument("caller", type(caller), "the function returned no text, int or UUID", fix)
        return caller

    # After the body was read

    def admit(self, selected: Selected, body: bytes, *, is_form: bool = False) -> Admission | Response | None:
        """Return the key and the fingerprint of a request, the response that refuses it, or None to pass it on.

        `is_form`: the body is a packed form, so its boundary means nothing any more.
        Only an event without an id is passed on: the handshake of a webhook.
        """
        request, caller, key = selected
        options = self.options
        if len(body) > options.max_body_bytes:
            return self.refuse("body-too-large")
        if options.source is not None:
            try:
                event = options.source.verify(request.headers, body)
            except BadSignature as error:
                log.warning("http.webhook_refused source=%s: %s", options.source.name, error.why,
                            extra={"source": options.source.name, "why": error.why})  # fmt: skip
                return self.refuse("webhook-refused")
            if event.id is None:
                return None
            key, caller = event.id, f"{tag_caller(caller)}:{options.source.name}:{event.source}"
        record = record_key(caller, request.method, request.path, key)
        return Admission(request, record, self._fingerprint(request, body, is_form))

    def _fingerprint(self, request: Request, body: bytes, is_form: bool = False) -> object:
        """Return what identifies the payload. A webhook has none: a provider may change fields of a retry."""
        if self.options.fingerprint is not None:
            return self.options.fingerprint(request, body)
        if self.options.source is not None:
            return None
        query, content_type = request.query, request.headers.get("content-type", "")
        media_type = spell_media_type(content_type, with_boundary=not is_form).encode(errors="surrogateescape")
        head = b"%d:%b%d:%b" % (len(query), query, len(media_type), media_type)
        if request.content_encoding:
            coding = request.content_encoding.encode(errors="surrogateescape")
            head = b"e%d:%b%b" % (len(coding), coding, head)  # without one a head begins with a digit
        return blake2b(head + body, digest_size=20).digest()

    # What is kept

    def is_kept(self, status: int) -> bool:
        """Return whether a response of this status ends the operation."""
        return status in self.options.statuses

    def pack(self, request: Request, response: Response) -> list[Any]:
        """Return what the record of a response stores.

        Raises:
            Released: its status is not kept, or the app broke off: the body is not as long as its Content-Length.
        """
        if not self.is_kept(response.status):
            raise Released
        if has_wrong_length(response):
            facts = log_facts(request)
            log.warning("http.wrong_length method=%s path=%s", *facts.values(), extra=facts)
            raise Released
        allowed = self.options.headers
        if self.options.redact is not None:
            body = response.body
            try:
                response = _check_redacted(self.options.redact(response), response.status)
            except Exception as error:  # noqa: BLE001 - the operation is done, whatever the function raises
                self.counters.add("http.redact_failed")
                facts, kind = log_facts(request), type(error).__name__
                log.error("http.redact_failed method=%s path=%s: %s", *facts.values(), kind, extra=facts)  # noqa: TRY400
                return self.pack_not_kept(response.status, "redacted")
            if response.body != body:
                allowed -= DIGESTS
        size = sum(len(name) + len(value) for name, value in response.headers if may_keep(name, allowed))
        if size > HEADER_BYTES or len(response.body) > self.options.max_response_bytes:
            return self.pack_not_kept(response.status, TOO_LARGE)
        packed = pack(response, allowed)
        self.counters.add("http.kept")
        return packed

    def pack_not_kept(self, status: int, why: str) -> list[Any]:
        """Return what the record of a response stores that is not kept. Raise Released if its status is not kept."""
        if not self.is_kept(status):
            raise Released
        self.counters.add("http.not_kept")
        return pack_not_kept(status, why)

    def pack_unreadable(self, request: Request, status: int, error: Exception) -> list[Any]:
        """Return what the record of a response stores that raised when it was read. Count and log that."""
        self.counters.add("http.record_failed")
        facts, kind = log_facts(request), type(error).__name__
        log.error("http.record_failed method=%s path=%s: %s", *facts.values(), kind, exc_info=error, extra=facts)
        return self.pack_not_kept(status, UNREADABLE)

    # What a verdict becomes

    def answer(self, verdict: Verdict[Any]) -> Response | None:
        """Return the response to a request that did not run, or None: it ran, and its own response is sent."""
        if verdict.ran:
            self._count_run(verdict)
            return None
        if verdict.outcome == "in_progress":
            left = math.ceil(verdict.delay(self.options.retry_after))
            return self.refuse("in-progress", max(1, min(left, self.options.retry_after)))
        if verdict.outcome == "duplicate":
            return self._answer_duplicate(verdict)
        error = verdict.error
        if isinstance(error, StoreError | LeaseLost):
            return self.refuse("store-unavailable", self.options.retry_after)
        for kind, name in _REJECTED.items():
            if isinstance(error, kind):
                return self.refuse(name)
        assert error is not None
        raise error

    def _count_run(self, verdict: Verdict[Any]) -> None:
        """Count a run. Kept responses were counted when they were packed."""
        if verdict.outcome == "failed":
            self.counters.add("http.released")
        elif verdict.outcome in ("lost", "unguarded"):
            self.counters.add(f"http.{verdict.outcome}")

    def _answer_duplicate(self, verdict: Verdict[Any]) -> Response:
        """Return the replay of a kept response, or the answer for one that was not kept."""
        stored = unpack(verdict.value)
        if stored is not None and stored.response is not None:
            self.counters.add("http.replayed")
            return _mark_replayed(stored.response)
        if self.options.source is not None:  # an error would make the provider send the event again and again
            self.counters.add("http.replayed")
            return _mark_replayed(Response(200 if stored is None else stored.status))
        return self.refuse("response-not-kept")

    def refuse(self, name: str, retry_after: int | None = None) -> Response:
        """Count a problem and return its response."""
        self.counters.add(f"http.{name.replace('-', '_')}")
        return build_problem(name, self.options.problem_base, retry_after)


def _on_error(error: BaseException) -> Literal["keep", "release"]:
    """Keep the claim of a response that is rendered later. Release it after other errors."""
    return "keep" if isinstance(error, Unrendered) else "release"


_REJECTED: Final = {
    KeyReused: "key-reused",
    OutcomeUnknown: "outcome-unknown",
    AttemptsExhausted: "attempts-exhausted",
}
"""The problem of each error of a key that does not run."""


def _check_redacted(response: object, status: int) -> Response:
    """Return what `redact` returned. Raise TypeError if it is no response that can be replayed."""
    if not isinstance(response, Response) or response.status != status or not isinstance(response.body, bytes):
        raise TypeError("redact must return a Response of the same status, with a body of bytes")
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in response.headers):
        raise TypeError("the headers that redact returns must be pairs of text")
    return response


def log_facts(found: Request | Admission) -> dict[str, object]:
    """Return the method and the path of a request for a log, and the record of an admitted one, which is a digest.

    The client chose method and path, so they are escaped.
    """
    if isinstance(found, Admission):
        return log_facts(found.request) | {"record": found.key}
    return {"method": one_line(found.method), "path": one_line(found.path)}


def is_verified(raw: Any) -> bool:
    """Return True if a webhook guard (`source=`) has verified this request.

    Args:
        raw: the `scope` of ASGI, the `environ` of WSGI, or the HttpRequest of Django.
    """
    places: list[Any] = [getattr(raw, "scope", raw), getattr(raw, "META", {})]
    return any(str(place.get(MARK)).startswith(f"{GUARDED}:") for place in places if hasattr(place, "get"))


def _mark_replayed(response: Response) -> Response:
    return Response(response.status, (*response.headers, ("idempotent-replayed", "true")), response.body)
