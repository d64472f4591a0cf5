"""The common part of all sources: the event, the errors, and the base class."""

from __future__ import annotations

import hmac
import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from idemgate import Duration, InvalidArgument
from idemgate.types import milliseconds

__all__ = [
    "BadSignature", "Event", "RequestHeaders", "Secrets", "SignedSource", "Source", "check_secrets", "parse_object",
]  # fmt: skip

Secrets = str | Sequence[str]
"""One secret, or several during a rotation: any of them verifies."""
RequestHeaders = Mapping[str, str] | Mapping[bytes, bytes]
"""All headers of a request, as text or as bytes (ASGI). Case does not matter."""

HIDDEN = "..."
"""The replacement for a secret in errors, which end up in logs."""
_SECONDS = re.compile(r"[0-9]{1,12}")
_LONGEST_ID = 1024


class Event(NamedTuple):
    """A verified event.

    Attributes:
        id: its id, which is the same at each attempt. It is the key for a guard. None for a message without an
            id, such as a handshake.
    """

    id: str | None
    source: str


class BadSignature(Exception):
    """A request that no secret signed, that is too old, or that is no event. Answer 400 or 401.

    `why` is the reason. It contains no secret and nothing of the request.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"not a webhook to trust: {self.why}"


class Source(ABC):
    """A sender of webhooks. `name` is the provider; `signed` says whether its signature proves who sent the event."""

    name: str
    signed: bool = True

    @abstractmethod
    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:
        """Verify a received request and return its event.

        Comparisons take the same time for all signatures.

        Args:
            headers: all headers of the request, as text or as bytes. Case does not matter.
            body: the raw bytes as received. JSON that was parsed and serialized again has other bytes.
            now: the time in seconds since 1970. None: the time of this machine.

        Raises:
            BadSignature: the signature or the event is invalid, or the request is too old.
            InvalidArgument: an argument is invalid.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # not the secrets


class SignedSource(Source):
    """A source whose secrets are text. The tolerance bounds the age of a request.

    Within the tolerance a copy of a request verifies again. The guard recognizes its id.

    Args:
        secret: the secret, or several during a rotation.
        tolerance: how old a request may be, or how far ahead of this machine's clock.

    Raises:
        InvalidArgument: there is no secret, or the tolerance is no duration.
    """

    def __init__(self, secret: Secrets, *, tolerance: Duration = "5m") -> None:
        self._secrets = [one.encode() for one in check_secrets(secret)]
        self._tolerance = milliseconds(tolerance, "tolerance", zero=True) / 1000


def check_secrets(
    given: Secrets, fix: str = "Pass the secret of the endpoint, or several during a rotation"
) -> list[str]:
    """Return the secrets. Raise InvalidArgument, which shows none of them."""
    if given is None or given == "":
        raise InvalidArgument("secret", given, "no secret", fix)
    if not isinstance(given, Iterable) or isinstance(given, Mapping):  # the keys of a dict are no secrets
        raise InvalidArgument("secret", HIDDEN, "neither text nor a list of text", fix)
    found = [given] if isinstance(given, str) else list(given)
    if not found:
        raise InvalidArgument("secret", found, "no secret", fix)
    if not all(isinstance(one, str) and one for one in found):
        raise InvalidArgument("secret", HIDDEN, "empty, or no text", fix)
    if any("\ud800" <= character <= "\udfff" for one in found for character in one):
        raise InvalidArgument("secret", HIDDEN, "holds half a surrogate pair", fix)
    return found


def check_body(body: object) -> bytes:
    """Return the body as bytes. Raise InvalidArgument for a parsed one."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidArgument("body", type(body), "not bytes", "Pass the raw body of the request, before it is parsed")
    return bytes(body)


def read_headers(headers: RequestHeaders) -> dict[str, str]:
    """Return the headers as text by their lower-case names. Bytes are Latin-1, as in HTTP."""
    return {_text(name).lower(): _text(value) for name, value in headers.items()}


def _text(value: object) -> str:
    """Return a name or value of a header as text. Other types have no text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("latin-1")
    return value if isinstance(value, str) else ""


def need(headers: Mapping[str, str], name: str) -> str:
    """Return a header. Raise BadSignature if it is missing or empty."""
    if not (value := headers.get(name, "")):
        raise BadSignature(f"it has no {name}")
    return value


def check_time(text: str, name: str, tolerance: float, now: float | None) -> None:
    """Raise BadSignature unless the text is a time in seconds since 1970 within the tolerance."""
    if not text.isascii() or not _SECONDS.fullmatch(text):
        raise BadSignature(f"its {name} is not a number of seconds")
    now = time.time() if now is None else now
    if not -math.inf < now < math.inf:
        raise InvalidArgument("now", now, "not a finite number of seconds", "Pass seconds since 1970, as time.time()")
    if abs(now - int(text)) > tolerance:
        raise BadSignature(f"its {name} is more than {tolerance:g} s from now")


def check_signature(secrets: Iterable[bytes], content: bytes, given: Sequence[bytes]) -> None:
    """Raise BadSignature unless one of the signatures is the HMAC-SHA256 of the content by one of the secrets."""
    ours = [hmac.digest(secret, content, "sha256") for secret in secrets]
    matches = [hmac.compare_digest(one, other) for other in given for one in ours]
    if not any(matches):
        raise BadSignature("no signature of it is of one of our secrets")


def read_hex(text: str) -> bytes:
    """Return the bytes of a hexadecimal signature, or b"" if it is none."""
    try:
        return bytes.fromhex(text) if text.isascii() else b""
    except ValueError:
        return b""


def name_source(provider: str, *parts: object) -> str:
    """Return the source of an event: the provider and what tells its endpoints or accounts apart.

    Parts that are no text count as missing. Different parts never make the same text.
    """
    texts = [part if isinstance(part, str) else "" for part in parts]
    if not any(texts):
        return provider
    return ":".join([provider, *(quote(text, safe="", errors="surrogatepass") for text in texts)])


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raise BadSignature if there is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadSignature("its body is not JSON") from None
    if not isinstance(found, dict):
        raise BadSignature("its body is not a JSON object")
    return cast("dict[str, Any]", found)


def check_id(value: object, name: str, ascii_only: bool = True) -> str:
    """Return an id. Raise BadSignature if it is no printable text of up to 1,024 characters."""
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= _LONGEST_ID
        or not value.isprintable()
        or (ascii_only and not value.isascii())
    ):
        raise BadSignature(f"its {name} is missing, or not printable{' ASCII' if ascii_only else ''}")
    return value
