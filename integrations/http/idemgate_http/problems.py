"""The answers that the middleware gives itself: problem details (RFC 9457), one table."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from idemgate_http.response import Response

__all__ = ["BASE", "PROBLEMS", "Problem", "build_problem"]

BASE: Final = "urn:idemgate:problem:"
"""The prefix of the `type` of each problem. `problem_base` replaces it."""


class Problem(NamedTuple):
    """The status and the texts of one kind of answer."""

    status: int
    title: str
    detail: str


PROBLEMS: Final = {
    "key-missing": Problem(
        400, "Idempotency-Key is missing",
        "This operation needs the header Idempotency-Key. Send a value that is unique to the operation, and the same "
        "value with each retry.",
    ),
    "key-malformed": Problem(
        400, "Idempotency-Key is malformed",
        'Send one Idempotency-Key of 1 to 255 printable ASCII characters, as a string in quotes: "8e03978e".',
    ),
    "caller-unknown": Problem(
        400, "The caller is unknown",
        "The request does not say who sends it, so a response cannot be kept for its retry. Authenticate the request.",
    ),
    "webhook-refused": Problem(
        400, "The webhook is not valid", "Its signature, its time or its event id is missing or wrong.",
    ),
    "body-incomplete": Problem(
        400, "The body is incomplete",
        "The body has fewer bytes than Content-Length says, or Content-Length is no number. Send the request again.",
    ),
    "body-too-large": Problem(
        413, "The body is too large", "The body of a request with an Idempotency-Key is larger than this server reads.",
    ),
    "in-progress": Problem(
        409, "A request is outstanding for this Idempotency-Key",
        "The first request with this key still runs. Retry later with the same key to get its response.",
    ),
    "key-reused": Problem(
        422, "Idempotency-Key is already used",
        "This key was used with another query string, media type, Content-Encoding or body. Use a new key "
        "for another operation.",
    ),
    "response-not-kept": Problem(
        409, "The response was not kept",
        "The operation with this key is done, and it does not run again. Its response was not kept. Read the resource "
        "to see the result.",
    ),
    "outcome-unknown": Problem(
        409, "The outcome of the operation is unknown",
        "A server started the operation with this key and stopped before its end. It does not run again before an "
        "operator has decided.",
    ),
    "attempts-exhausted": Problem(
        409, "The operation has failed too often",
        "The operation with this key was started as often as this server allows. It does not run again.",
    ),
    "store-unavailable": Problem(
        503, "Idempotency-Key cannot be checked",
        "The operation did not run, because the store of the keys did not answer. Retry later with the same key.",
    ),
}  # fmt: skip
"""All problems by the last part of their `type`."""


def build_problem(name: str, base: str = BASE, retry_after: int | None = None) -> Response:
    """Return the response of a problem. `retry_after` is in seconds."""
    problem = PROBLEMS[name]
    body = {"type": base + name, "title": problem.title, "status": problem.status, "detail": problem.detail}
    headers = [("content-type", "application/problem+json"), ("cache-control", "no-store")]
    if retry_after is not None:
        headers.append(("retry-after", str(retry_after)))
    return Response(problem.status, tuple(headers), json.dumps(body).encode())
