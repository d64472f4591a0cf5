"""Stripe: `Stripe-Signature: t=...,v1=...`, HMAC-SHA256 over "timestamp.body", the id in the body."""

from __future__ import annotations

from idemgate_http.webhooks.event import (
    BadSignature,
    Event,
    RequestHeaders,
    SignedSource,
    check_body,
    check_id,
    check_signature,
    check_time,
    name_source,
    need,
    parse_object,
    read_headers,
    read_hex,
)

__all__ = ["Stripe"]


class Stripe(SignedSource):
    """The webhooks of Stripe. The secret of an endpoint begins with "whsec_", and is used as it is.

    Two endpoints that receive the same event get the same id. Each endpoint has a path, which is part of the key. The
    connected account of an event (`account`, or `context` of a thin event) is part of the source.
    """

    name = "stripe"

    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:
        """Verify a received request and return its event; see `Source.verify`."""
        body = check_body(body)
        parts = [part.strip().partition("=") for part in need(read_headers(headers), "stripe-signature").split(",")]
        times = [value for name, _, value in parts if name == "t"]
        if len(times) != 1:
            raise BadSignature("its stripe-signature has not one time")
        check_time(times[0], "time", self._tolerance, now)
        given = [read_hex(value) for name, _, value in parts if name == "v1"]
        check_signature(self._secrets, times[0].encode() + b"." + body, given)
        event = parse_object(body)
        account = event.get("account") or event.get("context")
        return Event(check_id(event.get("id"), "id"), name_source(self.name, account))
