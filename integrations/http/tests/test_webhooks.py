"""Webhooks of each provider: signatures that are made as the provider's manual says, and their copies on each face."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from idemgate_http.webhooks import (
    BadSignature,
    CloudEvents,
    Event,
    GitHub,
    Secrets,
    Shopify,
    Slack,
    Source,
    StandardWebhooks,
    Stripe,
    new_secret,
    sign,
)

from idemgate import InvalidArgument
from integrations.http.tests.apps import Answer
from integrations.http.tests.conftest import Client, Effects
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)

AT = 1_700_000_000
STANDARD = new_secret()


def hexdigest(secret: str, content: str) -> str:
    return hmac.new(secret.encode(), content.encode(), hashlib.sha256).hexdigest()


def stripe(secret: str, body: str, at: int) -> dict[str, str]:
    return {"Stripe-Signature": f"t={at},v0=00ff,v1={hexdigest(secret, f'{at}.{body}')}"}


def github(secret: str, body: str, at: int) -> dict[str, str]:
    return {"X-GitHub-Delivery": "evt_1", "X-Hub-Signature-256": "sha256=" + hexdigest(secret, body)}


def slack(secret: str, body: str, at: int) -> dict[str, str]:
    signature = hexdigest(secret, f"v0:{at}:{body}")
    return {"X-Slack-Request-Timestamp": str(at), "X-Slack-Signature": "v0=" + signature}


def shopify(secret: str, body: str, at: int) -> dict[str, str]:
    signature = b64encode(hmac.digest(secret.encode(), body.encode(), "sha256")).decode()
    return {
        "X-Shopify-Hmac-SHA256": signature,
        "X-Shopify-Webhook-Id": "evt_1",
        "X-Shopify-Shop-Domain": "Anna.myshopify.com",
    }


def svix(secret: str, body: str, at: int) -> dict[str, str]:
    return {f"svix-{name.partition('-')[2]}": value for name, value in standard(secret, body, at).items()}


def standard(secret: str, body: str, at: int) -> dict[str, str]:
    signature = sign(secret, "evt_1", at, body.encode())
    return {"webhook-id": "evt_1", "webhook-timestamp": str(at), "webhook-signature": signature}


class Provider:
    """How a provider signs, and the source that verifies it."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Source],
        signing: Any,
        secrets: tuple[str, str],
        timed: bool,
        source: str = "",
    ) -> None:
        self.source = source or name
        self.name, self.make, self.signing, self.timed = name, make, signing, timed
        self.secret, self.other = secrets
        self.body = json.dumps({"id": "evt_1", "event_id": "evt_1", "type": "charge", "zo\u00eb": 1})

    def headers(self, secret: str, body: str | None = None, at: int = AT) -> dict[str, str]:
        return dict(self.signing(secret, self.body if body is None else body, at))

    def verify(self, secret: Secrets, headers: Any, body: str | None = None, now: float = AT) -> Event:
        return self.make(secret).verify(headers, (self.body if body is None else body).encode(), now)


PLAIN = ("s3cret-one", "s3cret-two")
PROVIDERS = [
    Provider("stripe", Stripe, stripe, PLAIN, True),
    Provider("github", GitHub, github, PLAIN, False),
    Provider("slack", Slack, slack, PLAIN, True),
    Provider("standard", StandardWebhooks, standard, (STANDARD, new_secret()), True),
    Provider("svix", StandardWebhooks, svix, (STANDARD, new_secret()), True, "standard"),
    Provider("shopify", Shopify, shopify, PLAIN, False, "shopify:anna.myshopify.com"),
]


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_signed_event_has_its_id(provider: Provider) -> None:
    headers = provider.headers(provider.secret)
    assert provider.verify(provider.secret, headers) == Event("evt_1", provider.source)
    upper = {name.upper(): value for name, value in headers.items()}
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert provider.verify(provider.secret, upper).id == provider.verify(provider.secret, raw).id == "evt_1"


def test_any_of_several_secrets_verifies(provider: Provider) -> None:
    for signed_by in (provider.secret, provider.other):
        assert provider.verify([provider.other, provider.secret], provider.headers(signed_by)).id == "evt_1"
    with pytest.raises(BadSignature, match="no signature"):
        provider.verify(provider.other, provider.headers(provider.secret))


def test_another_body_is_refused(provider: Provider) -> None:
    with pytest.raises(BadSignature):
        provider.verify(provider.secret, provider.headers(provider.secret), provider.body + " ")


@for_each("change", [lambda value: "", lambda value: value[:-2], lambda value: "\u00e9" + value,
                                    lambda value: value + "00", lambda value: value.replace("v", "w")])  # fmt: skip
def test_every_changed_signature_is_refused(provider: Provider, change: Any) -> None:
    headers = provider.headers(provider.secret)
    for name in headers:
        if "signature" in name.lower() and change(headers[name]) != headers[name]:
            with pytest.raises(BadSignature):
                provider.verify(provider.secret, headers | {name: change(headers[name])})
    for name in headers:
        with pytest.raises(BadSignature):
            provider.verify(provider.secret, {other: headers[other] for other in headers if other != name})


@for_each(("apart", "trusted"), [(300, True), (301, False), (-300, True), (-301, False)])
def test_old_and_future_requests_are_refused(provider: Provider, apart: int, trusted: bool) -> None:
    headers = provider.headers(provider.secret)
    if trusted or not provider.timed:
        assert provider.verify(provider.secret, headers, now=AT + apart).id == "evt_1"
    else:
        with pytest.raises(BadSignature, match="300 s from now"):
            provider.verify(provider.secret, headers, now=AT + apart)


@given(text=st.text(max_size=200))
def test_nobody_signs_by_chance(text: str) -> None:
    for provider in PROVIDERS:
        headers = dict.fromkeys(provider.headers(provider.secret), text)
        with pytest.raises(BadSignature):
            provider.verify(provider.secret, headers)


@for_each("secret", ["", [], [""], [b"x"], ["ok", ""], None, b"x", {"ok": 1}, "ok\ud800", ["ok\ud800"], 7])
def test_no_secret_is_refused_and_none_is_shown(provider: Provider, secret: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        provider.make(secret)
    assert "ok" not in str(refused.value).split("Pass")[0]
    assert "ok" not in repr(refused.value.__context__)


def test_secrets_are_not_shown(provider: Provider) -> None:
    source = provider.make(provider.secret)
    assert provider.secret not in repr(source)
    with pytest.raises(BadSignature) as refused:
        source.verify(provider.headers(provider.other), provider.body.encode(), AT)
    assert provider.secret not in f"{refused.value} {refused.value.why}"


def test_a_parsed_body_is_refused(provider: Provider) -> None:
    with pytest.raises(InvalidArgument, match="raw body"):
        provider.make(provider.secret).verify(provider.headers(provider.secret), {"id": 1}, AT)  # type: ignore[arg-type]


@for_each("body", ["", "[]", "{}", '{"id": 5, "event_id": null}', '{"id": "", "event_id": "\\u00e9"}', "[" * 10**5])
def test_a_signed_body_without_an_id_is_refused(body: str) -> None:
    for provider in (PROVIDERS[0], PROVIDERS[2]):
        with pytest.raises(BadSignature):
            provider.verify(provider.secret, provider.headers(provider.secret, body), body)


@pytest.mark.parametrize("kind", ["url_verification", "app_rate_limited"])
def test_messages_of_slack_without_an_id(kind: str) -> None:
    body = json.dumps({"type": kind, "challenge": "c"})
    assert Slack("s").verify(slack("s", body, AT), body.encode(), AT) == Event(None, "slack")


def hook(id: str, target: str = "repository", owner: str = "42") -> dict[str, str]:
    return {
        "X-GitHub-Hook-ID": id,
        "X-GitHub-Hook-Installation-Target-Type": target,
        "X-GitHub-Hook-Installation-Target-ID": owner,
    }


def sources_of(make: Callable[..., Source], signing: Any, requests: list[tuple[dict[str, Any], dict[str, str]]]) -> Any:
    """Return the sources of events with one id, each with what its sender adds to the body and to the headers."""
    events: list[Event] = []
    for extra, headers in requests:
        body = json.dumps({"id": "evt_1", "event_id": "evt_1"} | extra)
        events.append(make("s").verify(signing("s", body, AT) | headers, body.encode(), AT))
    assert {event.id for event in events} == {"evt_1"}
    return [event.source for event in events]


def test_the_endpoints_and_accounts_of_a_provider_are_sources_of_their_own() -> None:
    hooks = [
        hook("7"),
        hook("8"),
        hook("7", "integration"),
        hook("7", owner="43"),
        hook("7", "a:b"),
        hook("7", "a", "b"),
    ]
    sources = {
        "github": sources_of(GitHub, github, [({}, one) for one in hooks]),
        "stripe": sources_of(Stripe, stripe, [({}, {}), ({"account": "acct_1"}, {}), ({"context": "acct_2"}, {})]),
        "slack": sources_of(Slack, slack, [({"api_app_id": a, "team_id": t}, {}) for a in "AB" for t in "TU"]),
        "shopify": sources_of(Shopify, shopify, [({}, {"X-Shopify-Shop-Domain": shop}) for shop in ("a.x", "b.x")]),
    }
    for name, found in sources.items():
        assert len(set(found)) == len(found), name
    assert sources["github"][0] == "github:repository:42:7"
    # A retry has the same source, whatever else its sender changes, and odd values of a signed body are no error
    assert sources_of(GitHub, github, [({"a": 1}, hooks[0])]) == sources["github"][:1]
    assert sources_of(Stripe, stripe, [({"account": 5}, {}), ({"account": "\ud800"}, {})]) == [
        "stripe",
        "stripe:%ED%A0%80",
    ]


def test_two_times_of_stripe_are_refused() -> None:
    headers = {"stripe-signature": f"t={AT},t={AT + 1},v1={hexdigest('s', f'{AT}.{{}}')}"}
    with pytest.raises(BadSignature, match="one time"):
        Stripe("s").verify(headers, b"{}", AT)


@for_each(
    ("headers", "body", "event"),
    [
        ({"Ce-Id": "1", "ce-source": "/shop"}, b"", Event("1", "/shop")),
        ({"ce-id": "a%20b", "ce-source": "/caf%c3%a9"}, b"", Event("a b", "/café")),
        ({"ce-id": "a%0Ab", "ce-source": "/s"}, b"", None),
        ({"ce-id": "a%20b", "ce-source": "/s"}, b"", Event("a b", "/s")),
        ({"ce-id": "%FF", "ce-source": "/s"}, b"", None),
        ({"ce-id": "50%", "ce-source": "/s"}, b"", None),
        ({"ce-id": "50%25", "ce-source": "/s"}, b"", Event("50%", "/s")),
        ({"content-type": "application/cloudevents+json; charset=utf-8"}, b'{"id":"1","source":"/"}', Event("1", "/")),
        ({"content-type": "application/cloudevents+json"}, '{"id":"é","source":"/"}'.encode(), Event("é", "/")),
        ({"content-type": "application/cloudevents+json"}, b'{"id":"\\ud800","source":"/"}', None),
        ({"content-type": "application/cloudevents+json"}, b'{"id":"1"}', None),
        ({"content-type": "application/cloudevents+avro"}, b"", None),
        ({"content-type": "application/cloudevents-batch+json"}, b'[{"id":"1","source":"/s"}]', None),
        ({"ce-id": "1"}, b"", None),
        ({}, b"{}", None),
    ],
)  # fmt: skip
def test_cloudevents(headers: dict[str, str], body: bytes, event: Event | None) -> None:
    if event is None:
        with pytest.raises(BadSignature):
            CloudEvents().verify(headers, body)
    else:
        assert CloudEvents().verify(headers, body) == event


# On each face


def send(client: Client, provider: Provider, secret: str, body: str | None = None, **headers: str) -> Any:
    body = provider.body if body is None else body
    fields = provider.headers(secret, body, int(time.time())) | headers
    return client.post(None, "/hooks", fields, content=body.encode())


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)
def test_copies_of_an_event_get_the_first_answer(serve: Callable[..., Client], provider: Provider, caplog: Any) -> None:
    effects = Effects(lambda call, number: Answer(b"%d" % number, 500 if number == 1 else 200))
    client = serve(effects, caller=None, source=provider.make(provider.secret))
    assert send(client, provider, provider.secret).status_code == 500  # the provider sends the event again
    assert send(client, provider, provider.secret).content == b"2"
    again = send(client, provider, provider.secret, provider.body.replace("charge", "charges"))
    assert (again.status_code, again.content) == (200, b"2")  # a provider may change fields of a retry
    assert len(effects.calls) == 2
    refused = send(client, provider, provider.other)
    assert (refused.status_code, refused.json()["type"]) == (400, "urn:idemgate:problem:webhook-refused")
    assert len(effects.calls) == 2
    assert f"http.webhook_refused source={provider.make(provider.secret).name}:" in caplog.text
    assert provider.secret not in caplog.text


def test_two_hooks_of_one_url_get_the_same_event(serve: Callable[..., Client]) -> None:
    """GitHub gives an event one delivery id, however many hooks subscribe to it."""
    effects = Effects(lambda call, number: Answer(b"%d" % number))
    client = serve(effects, caller=None, source=GitHub(["s", "of the app"]))
    provider = PROVIDERS[1]
    hooks = {"s": hook("7"), "of the app": hook("8", "integration")}
    answers = [send(client, provider, secret, **hooks[secret]) for secret in [*hooks, *hooks]]
    assert [answer.content for answer in answers] == [b"1", b"2", b"1", b"2"]


def test_a_copy_of_an_event_whose_answer_was_not_kept_is_accepted(serve: Callable[..., Client]) -> None:
    effects = Effects(lambda call, number: Answer(parts=[b"a", b"b"], status=202))
    client = serve(effects, caller=None, source=Stripe("s"))
    provider = PROVIDERS[0]
    assert send(client, provider, "s").content == b"ab"
    again = send(client, provider, "s")
    assert (again.status_code, again.content) == (202, b"")
    assert len(effects.calls) == 1


def test_the_handshake_of_slack_reaches_the_app(serve: Callable[..., Client]) -> None:
    effects = Effects(lambda call, number: Answer(call.body, 200))
    client = serve(effects, caller=None, source=Slack("s"))
    body = json.dumps({"type": "url_verification", "challenge": "c"})
    for _ in range(2):
        assert send(client, PROVIDERS[2], "s", body).json()["challenge"] == "c"
    assert len(effects.calls) == 2


def test_cloudevents_have_callers_and_sources(serve: Callable[..., Client]) -> None:
    effects = Effects(lambda call, number: Answer(b"%d" % number))
    client = serve(effects, source=CloudEvents())

    def post(account: str, source: str) -> bytes:
        return bytes(client.post(None, "/", {"x-account": account, "ce-id": "1", "ce-source": source}).content)

    assert [post("a", "/s"), post("b", "/s"), post("a", "/t"), post("a", "/s")] == [b"1", b"2", b"3", b"1"]
    # And the name of a caller does not run into the source, which the sender chooses
    assert [post("a", "b:cloudevents:c"), post("a:cloudevents:b", "c")] == [b"4", b"5"]


def test_a_middleware_may_apply_to_some_paths(serve: Callable[..., Client]) -> None:
    effects = Effects(lambda call, number: Answer(b"%d" % number))
    client = serve(effects, caller=None, source=Stripe("s"), applies_to=lambda request: request.path.endswith("/hooks"))
    assert client.post(None, "/other").status_code == 201
    assert client.post(None, "/hooks").status_code == 400
