"""GitHub: `X-Hub-Signature-256: sha256=...` over the body, the id in `X-GitHub-Delivery`."""

from __future__ import annotations

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
    read_hex,
)

__all__ = ["GitHub"]

_PREFIX = "sha256="
_HOOK = ("installation-target-type", "installation-target-id", "id")


class GitHub(SignedSource):
    """The webhooks of GitHub.

    One event has the same delivery id for each hook that subscribes to it. So the hook, and the repository,
    organization or app that it belongs to, are part of the source.

    The signature covers the body only. A captured request verifies for ever, and with another delivery id or hook it is
    another event. Only TLS protects against that.

    Args:
        secret: the secret of the webhook, or several during a rotation.
    """

    name = "github"

    def __init__(self, secret: Secrets) -> None:
        super().__init__(secret)

    def verify(self, headers: RequestHeaders, body: bytes, now: float | None = None) -> Event:  # noqa: ARG002
        """Verify a received request and return its event; see `Source.verify`. There is no time to check."""
        body, found = check_body(body), read_headers(headers)
        signature = need(found, "x-hub-signature-256")
        if not signature.startswith(_PREFIX):
            raise BadSignature("its x-hub-signature-256 is of another algorithm")
        check_signature(self._secrets, body, [read_hex(signature.removeprefix(_PREFIX))])
        hook = (found.get(f"x-github-hook-{part}") for part in _HOOK)
        delivery = check_id(need(found, "x-github-delivery"), "x-github-delivery")
        return Event(delivery, name_source(self.name, *hook))
