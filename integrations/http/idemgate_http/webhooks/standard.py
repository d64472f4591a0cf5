"""Standard Webhooks 1.0, symmetric: HMAC-SHA256 over "id.timestamp.body". Both ends of it: `sign` and `verify`."""

from __future__ import annotations

import hmac
import secrets
from base64 import b64decode, b64encode
from binascii import Error
from collections.abc import Iterator

from idemgate import Duration, InvalidArgument
from idemgate.types import milliseconds
from idemgate_http.webhooks.event import (
    BadSignature,
    Event,
    RequestHeaders,
    Secrets,
    Source,
    check_body,
    check_secrets,
    check_signature,
    check_time,
    need,
    read_headers,
)

__all__ = ["StandardWebhooks", "new_secret", "secret_bytes", "sign"]

PREFIX = "whsec_"
_HIDDEN = "whsec_..."
_FIX = 'Pass "whsec_" and the base64 of 24 to 64 random bytes; new_secret() makes one'


class StandardWebhooks(Source):
    """The webhooks of any sender that follows Standard Webhooks, such as `idemgate-webhook` and Svix.

    Svix calls the headers `svix-id`, `svix-timestamp` and `svix-signature`. They are read if there is no `webhook-id`.
    Nothing in a request names its endpoint. So give each sender and each endpoint a path, which is part of the key.

    Args:
        secret: the secret ("whsec_" and base64), or several during a rotation.
        tolerance: how old a request may be, or how far ahead of this machine's clock. Within this time a copy of a
            request verifies again. The guard recognizes its id.

    Raises:
        InvalidArgument: a secret or the tolerance is invalid. The error does not show the secret.
    """

    name = "standard"

    def __init__(self, secret: Secrets, *, tolerance: Duration = "5m") -> None:
        self._keys = secret_bytes(secret)
        self._tolerance = milliseconds(tolerance, "tolerance", zero=True) / 1000

    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:
        """Verify a received request and return its event; see `Source.verify`."""
        body, found = check_body(body), read_headers(headers)
        kind = "svix" if "svix-id" in found and "webhook-id" not in found else "webhook"
        id, sent_at, signatures = (need(found, f"{kind}-{part}") for part in ("id", "timestamp", "signature"))  # noqa: A001
        check_time(sent_at, f"{kind}-timestamp", self._tolerance, now)
        if not is_unambiguous(id):
            raise BadSignature(f"its {kind}-id is not printable ASCII without full stops")
        check_signature(self._keys, _content(id, sent_at, body), list(_read_signatures(signatures)))
        return Event(id, self.name)


def new_secret() -> str:
    """Return a new random secret: "whsec_" and the base64 of 32 bytes. Both ends keep it in this form."""
    return PREFIX + b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(given: Secrets) -> list[bytes]:
    """Return the bytes of one or several secrets. Raise InvalidArgument, which shows none of them."""
    return [_decode_secret(one) for one in check_secrets(given, _FIX)]


def _decode_secret(secret: str) -> bytes:
    if not secret.startswith(PREFIX):
        raise InvalidArgument("secret", _HIDDEN, 'does not begin with "whsec_"', _FIX)
    text = secret.removeprefix(PREFIX).rstrip("=")
    try:
        key = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (Error, ValueError):
        raise InvalidArgument("secret", _HIDDEN, "is not base64", _FIX) from None
    if not 24 <= len(key) <= 64:
        raise InvalidArgument("secret", _HIDDEN, f"is {len(key)} bytes long", _FIX)
    return key


def sign(secret: Secrets, id: str, timestamp: int, body: bytes) -> str:  # noqa: A002 - what the specification calls it
    """Return the value of `webhook-signature`: one signature for each secret.

    Args:
        secret: the secret, or several during a rotation.
        id: the id of the webhook, the same at each attempt.
        timestamp: the time of this attempt in seconds since 1970.
        body: the bytes that are sent.

    Raises:
        InvalidArgument: the id or a secret is invalid.
    """
    if not is_unambiguous(id):
        raise InvalidArgument(
            "id", id, "not printable ASCII without full stops", "A full stop separates what is signed"
        )
    content = _content(id, str(timestamp), body)
    return " ".join(f"v1,{b64encode(hmac.digest(key, content, 'sha256')).decode()}" for key in secret_bytes(secret))


def is_unambiguous(id: str) -> bool:  # noqa: A002
    """Return whether the signature of an id is one of this id only. A full stop could also begin the rest."""
    return bool(id) and id.isascii() and id.isprintable() and "." not in id


def _read_signatures(signatures: str) -> Iterator[bytes]:
    """Yield the v1 signatures of a header. Others ("v1a": asymmetric) are ignored."""
    for one in signatures.split():
        version, _, text = one.partition(",")
        if version == "v1":
            try:
                yield b64decode(text, validate=True)
            except (Error, ValueError):
                continue


def _content(id: str, sent_at: str, body: bytes) -> bytes:  # noqa: A002
    return b".".join((id.encode(), sent_at.encode(), body))
