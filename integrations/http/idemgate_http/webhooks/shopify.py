"""Shopify: `X-Shopify-Hmac-Sha256` over the body, the id in `X-Shopify-Webhook-Id`."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error

from idemgate_http.webhooks.event import (
    BadSignature,
    Event,
    RequestHeaders,
    Secrets,
    SignedSource,
    check_body,
    check_id,
    check_signature,
    name_source,
    need,
    read_headers,
)

__all__ = ["Shopify"]


class Shopify(SignedSource):
    """The webhooks of Shopify. The secret is the client secret of the app.

    The id is that of a delivery, and the same at each attempt. `X-Shopify-Event-Id` is shared by all topics and
    subscriptions that one change in a shop triggers, so it is not the id. The shop is part of the source.

    The signature covers the body only. A captured request verifies for ever, and with another id it is another event.
    Only TLS protects against that.

    Args:
        secret: the client secret of the app, or several during a rotation.
    """

    name = "shopify"

    def __init__(self, secret: Secrets) -> None:
        super().__init__(secret)

    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:  # noqa: ARG002
        """Verify a received request and return its event; see `Source.verify`. There is no time to check."""
        body, found = check_body(body), read_headers(headers)
        try:
            signature = b64decode(need(found, "x-shopify-hmac-sha256"), validate=True)
        except (Error, ValueError):
            raise BadSignature("its x-shopify-hmac-sha256 is not base64") from None
        check_signature(self._secrets, body, [signature])
        shop = check_id(need(found, "x-shopify-shop-domain"), "x-shopify-shop-domain").lower()
        id = check_id(need(found, "x-shopify-webhook-id"), "x-shopify-webhook-id")  # noqa: A001
        return Event(id, name_source(self.name, shop))
