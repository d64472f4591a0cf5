"""Webhooks on idemgate: a JSON body to a URL, signed, on a schedule of attempts, never again after success."""

from __future__ import annotations

from idemgate_http.webhooks import BadSignature, StandardWebhooks, new_secret, sign

from idemgate_webhook.answers import Attempt, History
from idemgate_webhook.guarded import AddressRefused, Guarded
from idemgate_webhook.reach import Reach
from idemgate_webhook.webhooks import SCHEDULE, AioWebhooks, Rejected, Undelivered, Webhooks

__all__ = [
    "SCHEDULE",
    "AddressRefused",
    "AioWebhooks",
    "Attempt",
    "BadSignature",
    "Guarded",
    "History",
    "Reach",
    "Rejected",
    "StandardWebhooks",
    "Undelivered",
    "Webhooks",
    "new_secret",
    "sign",
]
