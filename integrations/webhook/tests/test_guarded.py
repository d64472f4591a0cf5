"""The transport: connects to what was checked, and to nothing else."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
import trustme
from idemgate_webhook import AddressRefused, Guarded

from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)

HERE = ["127.0.0.1"]


class Names:
    """A resolver that gives the first answer once, the next one after that; the last for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def fetch(transport: Guarded, url: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=transport, timeout=5, **options) as client:
        return await client.post(url, content=b"{}")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "0.0.0.0",
    ],
)
async def test_this_machine_is_not_reached_in_any_spelling(receiver: Any, host: str) -> None:
    with pytest.raises(AddressRefused, match="not a public address"):
        await fetch(Guarded(), receiver.url(host=host))
    assert receiver.connections == 0


@for_each("address", ["169.254.169.254", "10.0.0.1", "fd00:ec2::254", "fe80::1%1", "224.0.0.1", "100.100.100.200"])
async def test_a_name_that_stands_for_a_closed_address_is_refused(address: str) -> None:
    with pytest.raises(AddressRefused, match=r"metadata\.example"):
        await fetch(Guarded(HERE, resolve=Names([address])), "http://metadata.example/")


async def test_a_second_answer_of_the_name_server_changes_nothing(receiver: Any) -> None:
    # Given a name whose first answer is allowed, and whose next is not
    names = Names(HERE, ["127.0.0.2"])
    # When a request is sent
    answer = await fetch(Guarded(HERE, resolve=names), receiver.url(host="rebind.example"))
    # Then the name was asked once, and the connection went to what was checked
    assert answer.status_code == 200
    assert names.asked == [("rebind.example", receiver.port)]
    assert (await receiver.next()).headers["host"] == f"rebind.example:{receiver.port}"


async def test_the_other_way_round_it_is_refused(receiver: Any) -> None:
    with pytest.raises(AddressRefused):
        await fetch(Guarded(HERE, resolve=Names(["127.0.0.2"], HERE)), receiver.url(host="rebind.example"))
    assert receiver.connections == 0


async def test_of_several_addresses_only_those_allowed_are_tried(receiver: Any, listen: Any) -> None:
    async with listen("127.0.0.2", receiver.port) as closed:
        transport = Guarded(HERE, resolve=Names(["127.0.0.2", "127.0.0.1"]))
        assert (await fetch(transport, receiver.url(host="both.example"))).status_code == 200
        assert (closed.connections, receiver.connections) == (0, 1)


async def test_an_address_that_takes_no_connection_is_passed_over(receiver: Any) -> None:
    transport = Guarded(["127.0.0.0/8", "::1"], resolve=Names(["::1", "127.0.0.3", "127.0.0.1"]))
    assert (await fetch(transport, receiver.url(host="several.example"))).status_code == 200
    with pytest.raises(httpx.ConnectError):
        await fetch(Guarded(["127.0.0.3"], resolve=Names(["127.0.0.3"])), receiver.url(host="one.example"))


async def test_a_name_that_is_not_known_is_a_connection_error() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolve in (unknown, Names([])):
        with pytest.raises(httpx.ConnectError) as failed:
            await fetch(Guarded(resolve=resolve), "http://nowhere.example/")
        assert not isinstance(failed.value, AddressRefused)


async def test_a_redirect_that_a_client_follows_is_checked_again(receiver: Any, respond: Callable[..., bytes]) -> None:
    receiver.answers = [respond("307 Temporary Redirect", "Location: http://169.254.169.254/latest/meta-data")]
    with pytest.raises(AddressRefused, match=r"169\.254\.169\.254"):
        await fetch(Guarded(HERE), receiver.url(), follow_redirects=True)


async def test_the_proxies_of_the_environment_are_not_used(receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await fetch(Guarded(HERE), receiver.url())).status_code == 200


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def names_asked() -> list[str | None]:
    return []


@pytest.fixture
def serving(authority: trustme.CA, names_asked: list[str | None]) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("a.example", "b.example").configure_cert(context)
    context.sni_callback = lambda _, name, __: names_asked.append(name)
    return context


async def test_tls_is_with_the_name_though_the_connection_is_to_the_address(
    listen: Any, serving: ssl.SSLContext, trusting: ssl.SSLContext, names_asked: list[str | None]
) -> None:
    async with listen(tls=serving) as receiver:
        transport = Guarded(HERE, tls=trusting, resolve=Names(HERE))
        answer = await fetch(transport, receiver.url(host="a.example", scheme="https"))
        assert answer.status_code == 200
        assert names_asked == ["a.example"]
        assert (await receiver.next()).headers["host"] == f"a.example:{receiver.port}"


async def test_a_certificate_of_another_name_is_refused(
    listen: Any, serving: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    async with listen(tls=serving) as receiver:
        transport = Guarded(HERE, tls=trusting, resolve=Names(HERE))
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await fetch(transport, receiver.url(host="c.example", scheme="https"))
        with pytest.raises(httpx.ConnectError, match="certificate"):  # nor does the usual trust know this authority
            await fetch(Guarded(HERE, resolve=Names(HERE)), receiver.url(host="a.example", scheme="https"))
        assert receiver.requests.empty()


async def test_two_hosts_of_one_address_do_not_share_a_connection(
    listen: Any, serving: ssl.SSLContext, trusting: ssl.SSLContext, names_asked: list[str | None]
) -> None:
    async with listen(tls=serving) as receiver:
        transport = Guarded(HERE, tls=trusting, resolve=Names(HERE))
        async with httpx.AsyncClient(transport=transport) as client:
            for host in ("a.example", "b.example"):
                await client.post(receiver.url(host=host, scheme="https"), content=b"{}")
        assert names_asked == ["a.example", "b.example"]
        assert receiver.connections == 2
