"""Webhooks of others: verify a request, and find the id by which a guard recognizes its copies."""

from __future__ import annotations

from idemgate_http.webhooks.cloudevents import CloudEvents
from idemgate_http.webhooks.event import BadSignature, Event, Secrets, Source
from idemgate_http.webhooks.github import GitHub
from idemgate_http.webhooks.shopify import Shopify
from idemgate_http.webhooks.slack import Slack
from idemgate_http.webhooks.standard import StandardWebhooks, new_secret, secret_bytes, sign
from idemgate_http.webhooks.stripe import Stripe

__all__ = [
    "BadSignature",
    "CloudEvents",
    "Event",
    "GitHub",
    "Secrets",
    "Shopify",
    "Slack",
    "Source",
    "StandardWebhooks",
    "Stripe",
    "new_secret",
    "secret_bytes",
    "sign",
]
