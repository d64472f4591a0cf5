"""Standard Webhooks 1.0, symmetric: HMAC-SHA256 over "id.timestamp.body". Both ends of it: `sign` and `verify`."""

from __future__ import annotations

import hmac
import math
import re
import secrets
import time
from base64 import b64decode, b64encode
from binascii import Error
from collections.abc import Callable, Iterator, Mapping, Sequence

from idemgate import Duration, InvalidArgument
from idemgate.types import milliseconds

__all__ = ["BadSignature", "Secrets", "new_secret", "secret_bytes", "sign", "verify"]

Secrets = str | Sequence[str]
"""One secret, or several while they are rotated: all of them sign, and any of them verifies."""

PREFIX = "whsec_"
_SECONDS = re.compile(r"[0-9]{1,12}")
_HIDDEN = "whsec_..."
"""Stands for a secret in errors: what is in an error is in a log."""


class BadSignature(Exception):
    """A request that is not what one of our secrets signed, or not of now. `why` says which; answer 400 or 401."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"not a webhook to trust: {self.why}"


def new_secret() -> str:
    """A new random secret: 32 bytes, in the form in which both ends keep it ("whsec_" and base64)."""
    return PREFIX + b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(given: Secrets) -> list[bytes]:
    """The keys of one or several secrets. InvalidArgument, which does not show it, for what is none."""
    found = [given] if isinstance(given, str) else list(given)
    if not found:
        raise InvalidArgument(
            "secret", found, "there is none", "Pass one, or several while you rotate; new_secret() makes one"
        )
    return [_key(one) for one in found]


def _key(secret: object) -> bytes:
    fix = 'Pass "whsec_" and the base64 of 24 to 64 random bytes; new_secret() makes one'
    if not isinstance(secret, str) or not secret.startswith(PREFIX):
        raise InvalidArgument("secret", _HIDDEN, 'does not begin with "whsec_"', fix)
    text = secret.removeprefix(PREFIX).rstrip("=")
    try:
        key = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (Error, ValueError):
        raise InvalidArgument("secret", _HIDDEN, "is not base64", fix) from None
    if not 24 <= len(key) <= 64:
        raise InvalidArgument("secret", _HIDDEN, f"is {len(key)} bytes long", fix)
    return key


def sign(secret: Secrets, id: str, timestamp: int, body: bytes) -> str:  # noqa: A002 - what the specification calls it
    """The value of `webhook-signature`: one signature a secret. `timestamp`: of this attempt, seconds since 1970."""
    if not _is_unambiguous(id):
        raise InvalidArgument(
            "id", id, "not printable ASCII without full stops", "A full stop separates what is signed"
        )
    content = _content(id.encode(), b"%d" % timestamp, body)
    return " ".join(f"v1,{b64encode(_digest(key, content)).decode()}" for key in secret_bytes(secret))


def verify(
    secret: Secrets,
    headers: Mapping[str, str] | Mapping[bytes, bytes],
    body: bytes,
    *,
    tolerance: Duration = "5m",
    clock: Callable[[], float] = time.time,
) -> str:
    """Verify a received request and return the webhook's id, which is the key for `gate.once`.

    It takes the same time for all signatures.

    Args:
        secret: the secret, or several during a rotation.
        headers: all headers of the request, as text or as bytes (ASGI). Case does not matter.
        body: the raw bytes as received. JSON that was parsed and serialized again has other bytes.
        tolerance: how old an attempt may be, or how far ahead of this machine's clock. Within this time a copy of a
            request verifies again. The id recognizes it.
        clock: a function that returns the seconds since 1970.

    Raises:
        BadSignature: the signature or a header is invalid, or the request is too old.
        InvalidArgument: an argument is invalid.
    """
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidArgument("body", type(body), "not bytes", "Pass the raw body of the request, before it is parsed")
    keys, allowed = secret_bytes(secret), milliseconds(tolerance, "tolerance", zero=True) / 1000
    found = {_text(name).lower(): value for name, value in headers.items()}
    id, timestamp, signatures = (_header(found, f"webhook-{part}") for part in ("id", "timestamp", "signature"))  # noqa: A001
    if not _SECONDS.fullmatch(timestamp):
        raise BadSignature("its webhook-timestamp is not a number of seconds")
    if not _is_unambiguous(id):
        raise BadSignature("its webhook-id is not printable ASCII without full stops")
    now = clock()
    if not -math.inf < now < math.inf:
        raise InvalidArgument("clock", now, "not a finite number of seconds", "Return seconds since 1970, as time.time")
    if abs(now - int(timestamp)) > allowed:
        raise BadSignature(f"its webhook-timestamp is more than {allowed:g} s from now")
    content = _content(id.encode(), timestamp.encode(), bytes(body))
    ours = [_digest(key, content) for key in keys]
    matches = [hmac.compare_digest(one, given) for given in _given(signatures) for one in ours]
    if not any(matches):
        raise BadSignature("no signature of it is of one of our secrets")
    return id


def _header(headers: Mapping[str, object], name: str) -> str:
    value = _text(headers.get(name))
    if not value:
        raise BadSignature(f"it has no {name}")
    return value


def _text(value: object) -> str:
    """Return a name or value of a header as text. Bytes are Latin-1, as in HTTP; other types have no text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("latin-1")
    return value if isinstance(value, str) else ""


def _is_unambiguous(id: str) -> bool:  # noqa: A002
    """Return whether the signature of an id is one of this id only. A full stop could also begin the rest."""
    return bool(id) and id.isascii() and id.isprintable() and "." not in id


def _given(signatures: str) -> Iterator[bytes]:
    """The v1 signatures of a header; others ("v1a": asymmetric) are not for us."""
    for one in signatures.split():
        version, _, text = one.partition(",")
        if version == "v1":
            try:
                yield b64decode(text, validate=True)
            except (Error, ValueError):
                continue


def _content(id: bytes, timestamp: bytes, body: bytes) -> bytes:  # noqa: A002
    return b".".join((id, timestamp, body))


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
