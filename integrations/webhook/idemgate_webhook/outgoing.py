"""What is to be sent, checked and written down when `send` is called: a retry sends the same bytes."""

from __future__ import annotations

import json
import re

import httpx

from idemgate import InvalidArgument
from idemgate_webhook.guarded import Guarded
from idemgate_webhook.reach import literal

__all__ = ["body_bytes", "checked_id", "checked_url"]

_ID = re.compile(r"[A-Za-z0-9_:/@+=~-]{1,200}")


def checked_id(id: str) -> str:  # noqa: A002 - the specification's word
    """The `webhook-id`. No full stop: it separates what is signed. No quotes: `Idempotency-Key` puts it into some."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise InvalidArgument("id", id, "not the id of a webhook", "Use 1 to 200 of A-Z a-z 0-9 _ - : / @ + = ~")
    return id


def checked_url(url: str, https_only: bool, transport: httpx.AsyncBaseTransport) -> str:
    """Return an absolute URL without credentials. Raises InvalidArgument, also for an address refused later."""
    try:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode("ascii")
    except (httpx.InvalidURL, TypeError, UnicodeError):
        raise InvalidArgument("url", _shown(url), "not a URL", 'Pass one such as "https://example.com/hooks"') from None
    if parsed.userinfo:
        fix = "Leave them out: what is signed needs none, and a URL is stored and shown"
        raise InvalidArgument("url", parsed.scheme + "://...", "has credentials in it", fix)
    allowed = ("https",) if https_only else ("https", "http")
    if parsed.scheme not in allowed or not host or not 1 <= (parsed.port or 1) <= 65_535:
        fix = f"Use {' or '.join(allowed)}, with a host" + ("; https_only=False allows http" if https_only else "")
        raise InvalidArgument("url", _shown(url), "not an absolute URL of an allowed scheme and port", fix)
    address = literal(host)
    if isinstance(transport, Guarded) and address and (why := transport.reach.refuses(address)):
        raise InvalidArgument("url", _shown(url), why, "Allow its network with allow=[...], if that is meant")
    return str(parsed)


def body_bytes(body: object) -> bytes:
    """JSON without spaces, UTF-8; bytes as they are. InvalidArgument for what JSON has not."""
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            "body", type(body), f"not JSON: {error}", "Pass what json.dumps takes, or bytes"
        ) from None


def _shown(url: object) -> object:
    """Without its query: keys are kept there."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if isinstance(url, str) else type(url)
