"""Idempotency-Key for HTTP: a retried request gets the first response. The faces are ASGI, WSGI, Django and Flask."""

from __future__ import annotations

from idemgate_http.asgi import IdempotencyKey
from idemgate_http.core import is_verified
from idemgate_http.keys import record_key
from idemgate_http.options import AsgiOptions, HttpOptions
from idemgate_http.request import Headers, Request
from idemgate_http.response import Response

__all__ = [
    "AsgiOptions",
    "Headers",
    "HttpOptions",
    "IdempotencyKey",
    "Request",
    "Response",
    "is_verified",
    "record_key",
]
