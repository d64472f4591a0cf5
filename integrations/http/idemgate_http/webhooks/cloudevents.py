"""CloudEvents 1.0 over HTTP, in binary and structured mode. They have no signature."""

from __future__ import annotations

import re
from urllib.parse import unquote

from idemgate_http.webhooks.event import (
    BadSignature,
    Event,
    RequestHeaders,
    Source,
    check_body,
    check_id,
    need,
    parse_object,
    read_headers,
)

__all__ = ["CloudEvents"]

_BARE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")


class CloudEvents(Source):
    """CloudEvents of any sender. `source` and `id` together identify an event.

    Nothing proves who sent the event. So a middleware with this source needs `caller` or `single_tenant`, as for an
    Idempotency-Key. Batches are refused, because they have no id.
    """

    name = "cloudevents"
    signed = False

    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:  # noqa: ARG002
        """Return the event of a received request; see `Source.verify`. No signature and no time are checked."""
        body, found = check_body(body), read_headers(headers)
        kind = found.get("content-type", "").partition(";")[0].strip().lower()
        if kind.startswith("application/cloudevents-batch"):
            raise BadSignature("it is a batch, which has no id")
        if kind.startswith("application/cloudevents"):
            if kind != "application/cloudevents+json":
                raise BadSignature("its event format is not JSON")
            event = parse_object(body)
            return Event(*(check_id(event.get(name), name, ascii_only=False) for name in ("id", "source")))
        return Event(_unquote(need(found, "ce-id"), "ce-id"), _unquote(need(found, "ce-source"), "ce-source"))


def _unquote(value: str, name: str) -> str:
    """Return an attribute of a header. The binding percent-encodes a "%", and what is no printable ASCII, as UTF-8.

    An invalid encoding is refused. Decoded all the same, two ids would become one.
    """
    valid = value.isascii() and not _BARE_PERCENT.search(value)
    try:
        text = unquote(value, errors="strict") if valid else ""
    except UnicodeDecodeError:
        text = ""
    return check_id(text, name, ascii_only=False)
