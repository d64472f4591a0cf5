"""Where the store is: URLs, clients of the user's, and what our own clients do with either."""

from __future__ import annotations

import asyncio
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio as aredis
from redis import connection

from idemgate import Gate
from idemgate.core.calls import new_id
from idemgate.errors import IdemgateError, InvalidArgument, NotConfigured, StoreUnavailable
from idemgate.store.embedded.server import find_server
from idemgate.store.endpoint import Endpoint, endpoint_from_client
from idemgate.store.url import endpoint_from_url
from idemgate.testing.proxy import Proxy
from tests.cluster import running, unused_ports, wait_for
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)

SECRET = "s3cr3t"

# -- URLs -------------------------------------------------------------------------------------------------------------

READ: list[tuple[str, str, dict[str, Any], tuple[tuple[str, int], ...]]] = [
    ("redis://cache:6380/3", "single", {"host": "cache", "port": 6380, "db": 3}, ()),
    ("redis://cache", "single", {"host": "cache"}, ()),
    ("redis://[::1]:7000", "single", {"host": "::1", "port": 7000}, ()),
    (f"redis://ann:{SECRET}%40@cache", "single", {"host": "cache", "username": "ann", "password": f"{SECRET}@"}, ()),
    (
        f"rediss://:{SECRET}@cache?ssl_cert_reqs=none",
        "single",
        {"host": "cache", "password": SECRET, "ssl_cert_reqs": "none", "connection_class": connection.SSLConnection},
        (),
    ),
    (
        "unix:///run/redis.sock?db=2",
        "single",
        {"path": "/run/redis.sock", "db": 2, "connection_class": connection.UnixDomainSocketConnection},
        (),
    ),
    ("redis://cache?decode_responses=True&protocol=3&socket_timeout=60", "single", {"host": "cache"}, ()),
    ("redis+cluster://h1:7000,h2,[::1]:7001", "cluster", {}, (("h1", 7000), ("h2", 6379), ("::1", 7001))),
    (f"redis+cluster://ann:{SECRET}@h1", "cluster", {"username": "ann", "password": SECRET}, (("h1", 6379),)),
    ("rediss+cluster://h1", "cluster", {"connection_class": connection.SSLConnection}, (("h1", 6379),)),
    ("redis+sentinel://s1,s2:26380/mymaster", "sentinel", {"db": 0}, (("s1", 26379), ("s2", 26380))),
    (f"redis+sentinel://:{SECRET}/x@s1/mymaster/4", "sentinel", {"password": f"{SECRET}/x", "db": 4}, (("s1", 26379),)),
    (
        "rediss+sentinel://s1/m?db=1",
        "sentinel",
        {"connection_class": connection.SSLConnection, "db": 1},
        (("s1", 26379),),
    ),
]


@for_each(("url", "kind", "settings", "nodes"), READ, ids=[entry[0] for entry in READ])
def test_a_url_is_read(url: str, kind: str, settings: dict[str, Any], nodes: tuple[tuple[str, int], ...]) -> None:
    found = endpoint_from_url(url)
    given = {name: value for name, value in found.settings.items() if value is not None}
    assert (found.kind, given, found.nodes) == (kind, settings, nodes)


def test_a_sentinel_url_names_its_service() -> None:
    assert endpoint_from_url("redis+sentinel://s1/my%20master/4").service == "my master"


@for_each("url", [entry[0] for entry in READ])
def test_an_endpoint_shows_no_secret(url: str) -> None:
    found = endpoint_from_url(url)
    assert SECRET not in f"{found} {found!r} {Gate(url)!r} {Gate(url).context.endpoint}"


BAD = [
    f"http://:{SECRET}@cache",
    f"redis+cluster+sentinel://:{SECRET}@cache",
    f"unix+cluster://:{SECRET}@cache",
    f":{SECRET}@cache:6379",
    f"redis://:{SECRET}/x@cache",  # / unescaped: redis-py takes what stands before for a port, and says so
    f"redis://:{SECRET}#x@cache",
    f"redis://:{SECRET}?x@cache:port",
    f"redis://:{SECRET}@cache:port",
    f"redis://user:{SECRET}",  # @host forgotten
    f"redis://:{SECRET}@[::1",
    *(f"redis://u:123{mark}{SECRET}@cache:1/0" for mark in ("?", "?a=", "#", "/", "/7?", "@cache?")),  # a port, then
    *(f"{scheme}://u:123?{SECRET}@cache:1/m" for scheme in ("redis+cluster", "redis+sentinel", "unix")),
    f"redis://cache/0?password={SECRET}&socket_timeout=soon",
    f"redis://cache/0?password={SECRET}@&socket_timeout=soon",
    f"redis+cluster://:{SECRET}@h1:7000,h2:port",
    f"redis+cluster://:{SECRET}@h1:70000",
    f"redis+cluster://:{SECRET}@",
    f"redis+cluster://:{SECRET}@h1,,h2",
    f"redis+sentinel://:{SECRET}@s1",
    f"redis+sentinel://:{SECRET}@s1/mymaster/first",
]


@for_each(
    "url",
    ["redis://h/abc", "rediss://h/abc", "redis://h/-1", "redis://h?db=-1", "redis://h/1/2", "redis://h/1x?protocol=3"],
)
def test_what_is_no_database_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"its path is not a database number.*Use rediss?://host:port/0"):
        Gate(url)


@for_each("url", ["redis://h", "redis://h/", "redis://h//0", "redis://h/2", "redis://h/x?db=2", "unix:///a/b"])
def test_a_database_is_a_number_in_the_path_or_the_query(url: str) -> None:
    assert Gate(url).context.endpoint.settings.get("db", 0) == (2 if "2" in url else 0)


@pytest.mark.parametrize("url", ["redis://u:p@h:1/0?client_name=a@b", "unix://u:p@/a@b.sock", "unix:///a@b.sock"])
def test_an_at_sign_elsewhere_is_no_end_of_a_password(url: str) -> None:
    assert endpoint_from_url(url).settings.get("password") == (None if "///" in url else "p")


@for_each("url", BAD)
def test_a_bad_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Gate(url)
    error = refused.value
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(error.value) + repr(vars(error))
    source_lines_left_out = shown.replace(repr(url), "")
    assert SECRET not in source_lines_left_out
    assert error.name == "url"


def test_a_harmless_bad_url_is_shown_whole() -> None:
    with pytest.raises(InvalidArgument, match=r"url='http://cache:6379/0': not a URL of a store\. Use one of redis://"):
        Gate("http://cache:6379/0")


@pytest.mark.parametrize("url", [f"redis://cache?password={SECRET}&brew=tea", f"redis+cluster://:{SECRET}@h1?brew=tea"])
def test_an_unknown_option_is_refused(url: str) -> None:
    with pytest.raises(NotConfigured, match="the URL has the setting brew") as refused:
        Gate(url)
    assert SECRET not in str(refused.value)


def test_without_a_store_the_fixes_are_named(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    # Given neither URL nor environment
    monkeypatch.delenv("IDEMGATE_URL", raising=False)
    gate = Gate()
    # When the gate is used first, Then it says what to do
    with pytest.raises(NotConfigured) as told:
        gate.first("k", "1s")
    for fix in ("redis://", "IDEMGATE_URL", "redis-py client", "embedded://"):
        assert fix in str(told.value)
    # And the environment is asked with the first use
    monkeypatch.setenv("IDEMGATE_URL", url)
    with gate:
        assert gate.first(new_id(), "1s")


# -- clients of the user's, on a real server --------------------------------------------------------------------------


def many_retries(cls: Any) -> Any:
    from redis.backoff import ConstantBackoff

    return cls(ConstantBackoff(0.001), 10)


def sync_users(port: int) -> dict[str, Any]:
    from redis.retry import Retry

    return {
        "decoding": redis.Redis(port=port, decode_responses=True, encoding="latin-1"),
        "RESP3": redis.Redis(port=port, protocol=3),
        "retrying": redis.Redis(
            port=port, retry=many_retries(Retry), retry_on_error=[redis.exceptions.ConnectionError]
        ),
        "patient": redis.Redis(port=port, socket_timeout=None, socket_connect_timeout=None, health_check_interval=1),
        "bounded": redis.Redis.from_pool(redis.BlockingConnectionPool(port=port, max_connections=1, timeout=1)),
        "one": redis.Redis(port=port, single_connection_client=False, client_name="shop", socket_keepalive=True),
    }


def async_users(port: int) -> dict[str, Any]:
    from redis.asyncio.retry import Retry

    return {
        "decoding, awaiting": aredis.Redis(port=port, decode_responses=True, protocol=3),
        "retrying, awaiting": aredis.Redis(port=port, retry=many_retries(Retry)),
        "bounded, awaiting": aredis.Redis.from_pool(aredis.BlockingConnectionPool(port=port, max_connections=1)),
    }


USERS = [*sync_users(0), *async_users(0)]


@pytest.mark.parametrize("user", USERS)
async def test_a_users_client_is_wrapped(user: str, asker: Any, proxy: Proxy) -> None:
    # Given a client with settings that would break the guard
    client = (sync_users(proxy.port) | async_users(proxy.port))[user]
    ask = asker(client)
    key = ask.claims.key("s", "k")
    await ask.run(ask.claims.inspect(key))
    before = proxy.count(b"EVALSHA")
    # When a key is claimed whose reply, of arbitrary bytes, gets lost twice
    note, owner = bytes(range(256)), new_id()
    proxy.cut_reply(b"EVALSHA", times=2)
    entry = await ask.run(ask.claims.claim(key, owner, 30_000, 60_000))
    # Then the script ran once for every reply, and no more often, and nothing was decoded
    assert proxy.count(b"EVALSHA") - before == 3
    assert (entry.state, entry.attempt) == ("started", 1)
    assert await ask.run(ask.claims.checkpoint(key, owner, note))
    assert (await ask.run(ask.claims.inspect(key))).checkpoint == note
    # And a guard works
    guarded = ask.gate.once(key="{n}", scope="s")(lambda n: n + 1)
    assert [await asyncio.to_thread(guarded, 1) for _ in range(2)] == [2, 2]
    if isinstance(client, aredis.Redis):
        await client.aclose()


async def test_our_connections_keep_the_users_name_and_database(asker: Any, proxy: Proxy) -> None:
    ask = asker(redis.Redis(port=proxy.port, client_name="shop", db=3))
    assert await ask.command("CLIENT", "GETNAME") == b"shop"
    assert b" db=3 " in await ask.command("CLIENT", "INFO")


async def test_a_client_of_a_unix_socket_is_wrapped(asker: Any, own_url: str) -> None:
    path = own_url.removeprefix("unix://")
    for client in (redis.Redis(unix_socket_path=path), aredis.Redis(unix_socket_path=path)):
        ask = asker(client)
        assert path in repr(ask.gate)
        assert await ask.command("PING") in (True, b"PONG")


def test_settings_of_tls_are_carried_over() -> None:
    given = {
        "ssl_ca_certs": "/ca.pem",
        "ssl_certfile": "/me.pem",
        "ssl_keyfile": "/me.key",
        "ssl_check_hostname": False,
    }
    for client in (redis.Redis("cache", ssl=True, **given), aredis.Redis(host="cache", ssl=True, **given)):
        found = endpoint_from_client(client)
        assert found.settings["connection_class"] is connection.SSLConnection
        assert {name: found.settings[name] for name in given} == given


def test_a_client_of_sentinels_is_wrapped() -> None:
    secret = {"password": SECRET}
    nodes = [("s1", 26379), ("s2", 26380)]
    for module in (redis, aredis):
        sentinel = module.Sentinel(nodes, sentinel_kwargs={"username": "guard", **secret})
        found = endpoint_from_client(sentinel.master_for("mymaster", db=2, **secret))
        assert (found.kind, found.nodes, found.service) == ("sentinel", tuple(nodes), "mymaster")
        assert (found.settings["password"], found.settings["db"]) == (SECRET, 2)
        assert found.sentinel_settings.items() >= {"username": "guard", **secret}.items()
        assert SECRET not in f"{found} {found!r}"


class Fake(connection.Connection):
    """As a fake server's connection is: it never reaches the store."""


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a fake": (lambda: redis.Redis.from_pool(redis.ConnectionPool(connection_class=Fake)), r"connects through .*Fake"),
    "a hook": (
        lambda: redis.Redis.from_pool(redis.ConnectionPool(redis_connect_func=print)),
        r"has the setting redis_connect_func, which cannot be carried over",
    ),
    "an awaiting hook": (
        lambda: aredis.Redis.from_pool(aredis.ConnectionPool(redis_connect_func=print)),
        r"has the setting redis_connect_func",
    ),
    "an unknown setting": (lambda: redis.Redis.from_pool(redis.ConnectionPool(brew="tea")), r"has the setting brew"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_client_that_cannot_be_wrapped_is_refused_with_the_reason(which: str) -> None:
    made, reason = REFUSED[which]
    with pytest.raises(NotConfigured, match=reason) as refused:
        Gate(made())
    assert "Pass a URL instead" in str(refused.value)


# -- TLS, on a real server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Port and certificate of a server that speaks TLS only."""
    home = tmp_path_factory.mktemp("tls")
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(home / "key.pem"), "-out", str(home / "cert.pem")]
    try:
        subprocess.run(["openssl", *made, *names, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    (port,) = unused_ports(1)
    options = {
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": str(home / "cert.pem"),
        "tls-key-file": str(home / "key.pem"),
        "tls-ca-cert-file": str(home / "cert.pem"),
        "tls-auth-clients": "no",
        "dir": str(home),
        "save": "",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with (
        running([find_server().path, *words]) as server,
        redis.Redis(port=port, ssl=True, ssl_ca_certs=str(home / "cert.pem")) as client,
    ):
        wait_for(lambda: server.poll() is not None or client.ping())
        if server.poll() is not None:
            pytest.skip("this server was built without TLS")
        yield port, home / "cert.pem"


@pytest.mark.parametrize("how", ["url", "client", "awaiting client"])
async def test_a_guard_works_over_tls(how: str, asker: Any, tls: tuple[int, Path]) -> None:
    port, cert = tls
    options: dict[str, Any] = {"port": port, "ssl": True, "ssl_ca_certs": str(cert)}
    if how == "url":
        ask = asker(f"rediss://localhost:{port}?ssl_ca_certs={cert}", timeout="60s")
    else:
        ask = asker(redis.Redis(**options) if how == "client" else aredis.Redis(**options), timeout="60s")
    key = ask.claims.key("s", new_id().hex())
    states = [(await ask.run(ask.claims.claim(key, new_id(), 1000, 1000))).state for _ in range(2)]
    assert states == ["started", "in_progress"]


async def test_an_unknown_certificate_is_not_accepted(asker: Any, tls: tuple[int, Path]) -> None:
    ask = asker(f"rediss://localhost:{tls[0]}", timeout="1s")
    with pytest.raises(StoreUnavailable, match="connecting to") as told:
        await ask.run(ask.claims.inspect(ask.claims.key("s", "k")))
    assert told.value.executed == "no"


async def test_a_check_that_awaiting_clients_cannot_make_is_not_left_out(asker: Any) -> None:
    # Given a client that checks revocation, which redis-py's asyncio cannot
    ask = asker(redis.Redis("127.0.0.1", 1, ssl=True, ssl_validate_ocsp=True), timeout="50ms")
    with pytest.raises(IdemgateError) as told:
        await ask.run(ask.claims.inspect(ask.claims.key("s", "k")))
    # Then the awaiting face says so instead of connecting without it
    assert isinstance(told.value, NotConfigured) is ask.awaiting


def test_an_endpoint_is_a_value() -> None:
    assert (
        endpoint_from_url("redis://cache/1")
        == endpoint_from_url("redis://cache/1")
        != endpoint_from_url("redis://cache/2")
    )
    assert isinstance(endpoint_from_url("redis://cache"), Endpoint)


# -- the URL of a gate ------------------------------------------------------------------------------------------------


def test_a_gate_says_where_its_store_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gate("embedded://") as gate, redis.Redis.from_url(str(gate.url)) as client:
        assert gate.first("a", "1m", scope="url")
        assert sum("url" in key.decode() for key in client.scan_iter()) == 1
        client.flushdb()
    secret = "redis://ann:secret@localhost:1/3"
    assert Gate(secret).url == secret
    with redis.Redis.from_url(url) as client:
        assert Gate(client).url is None
    monkeypatch.setenv("IDEMGATE_URL", secret)
    assert Gate().url == secret
    monkeypatch.delenv("IDEMGATE_URL")
    with pytest.raises(NotConfigured, match="no store is configured"):
        _ = Gate().url
