"""Slack: `X-Slack-Signature: v0=...` over "v0:timestamp:body", the id in `event_id` of the body."""

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

__all__ = ["Slack"]

_PREFIX = "v0="
_WITHOUT_ID = ("url_verification", "app_rate_limited")


class Slack(SignedSource):
    """The Events API of Slack. The secret is the signing secret of the app.

    `url_verification` and `app_rate_limited` have no id: their event has the id None. Slash commands and interactive
    payloads are no events and are refused. The app and the workspace are part of the source.
    """

    name = "slack"

    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:
        """Verify a received request and return its event; see `Source.verify`."""
        body, found = check_body(body), read_headers(headers)
        sent_at, signature = need(found, "x-slack-request-timestamp"), need(found, "x-slack-signature")
        check_time(sent_at, "x-slack-request-timestamp", self._tolerance, now)
        if not signature.startswith(_PREFIX):
            raise BadSignature("its x-slack-signature is of another version")
        given = read_hex(signature.removeprefix(_PREFIX))
        check_signature(self._secrets, b"v0:" + sent_at.encode() + b":" + body, [given])
        event = parse_object(body)
        if event.get("type") in _WITHOUT_ID:
            return Event(None, self.name)
        source = name_source(self.name, event.get("api_app_id"), event.get("team_id"))
        return Event(check_id(event.get("event_id"), "event_id"), source)
