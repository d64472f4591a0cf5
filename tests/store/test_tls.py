"""TLS on a real server: certificates of the server and the client, and the errors of each fault with their fix."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from idemgate import Gate
from idemgate.core.calls import new_id
from idemgate.errors import StoreUnavailable
from idemgate.store import connection as blocking
from idemgate.store.clients import async_client, sync_client
from idemgate.store.embedded.server import find_server
from idemgate.store.url import endpoint_from_url
from tests.cluster import running, unused_ports, wait_for

pytestmark = pytest.mark.one_in(3)


class Tls(NamedTuple):
    """A server that speaks TLS only and wants to know who calls; its certificate is for "localhost", of our CA."""

    port: int
    home: Path

    def url(self, host: str = "localhost", ca: str = "ca", me: str = "client", more: str = "") -> str:
        mine = f"&ssl_certfile={self.home}/{me}.pem&ssl_keyfile={self.home}/{me}.key" if me else ""
        return f"rediss://{host}:{self.port}?ssl_ca_certs={self.home}/{ca}.pem{mine}{more}"

    def raw(self) -> redis.Redis:
        return redis.Redis.from_url(self.url())


def openssl(home: Path, *words: str) -> None:
    try:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=home)
    except FileNotFoundError:
        pytest.skip("no openssl to make certificates with")


def signed(home: Path, name: str, ca: str, subject: str) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]
    openssl(home, "req", *key, "-subj", f"/CN={subject}", "-out", f"{name}.csr")
    # From Python 3.13 on a certificate has to say which key signed it, and that of the CA what it is for.
    (home / f"{name}.ext").write_text(f"subjectAltName=DNS:{subject}\nauthorityKeyIdentifier=keyid\n")
    by = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "1", "-extfile", f"{name}.ext"]
    openssl(home, "x509", "-req", "-in", f"{name}.csr", *by, "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    home = tmp_path_factory.mktemp("tls")
    for ca in ("ca", "other"):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{ca}.key"]
        use = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        openssl(home, "req", "-x509", *key, "-days", "1", "-subj", f"/CN={ca}", *use, "-out", f"{ca}.pem")
    signed(home, "server", "ca", "localhost")
    signed(home, "client", "ca", "shop")
    signed(home, "stranger", "other", "shop")
    (port,) = unused_ports(1)
    options = {
        "port": "0", "tls-port": str(port), "tls-cert-file": "server.pem", "tls-key-file": "server.key",
        "tls-ca-cert-file": "ca.pem", "tls-auth-clients": "yes", "dir": str(home), "save": "",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    made = Tls(port, home)
    with running(["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(home), find_server().path, *words]) as server:
        with made.raw() as client:
            wait_for(lambda: server.poll() is not None or client.ping())
        if server.poll() is not None:
            pytest.skip("this server was built without TLS")
        yield made


async def test_both_sides_know_each_other(asker: Any, tls: Tls) -> None:
    ask = asker(tls.url())
    key = ask.claims.key("s", new_id().hex())
    states = [(await ask.run(ask.claims.claim(key, new_id(), 1000, 1000))).state for _ in range(2)]
    assert states == ["started", "in_progress"]
    # And large requests and replies go through, in one piece
    owner, large = new_id(), bytes(range(256)) * 2000
    key = ask.claims.key("s", new_id().hex())
    await ask.run(ask.claims.claim(key, owner, 30_000, 1000))
    assert await ask.run(ask.claims.checkpoint(key, owner, large))
    assert (await ask.run(ask.claims.inspect(key))).checkpoint == large


REFUSED = {
    "a server by another name": ({"host": "127.0.0.1"}, r"(?i)certificate verify failed.*127\.0\.0\.1"),
    "another CA": ({"ca": "other"}, r"(?i)certificate verify failed"),
    "no certificate of ours": ({"me": ""}, r"(?i)connect|certificate|lost"),
    "a certificate of another CA": ({"me": "stranger"}, r"(?i)connect|certificate|lost"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("why", REFUSED)
async def test_who_cannot_prove_it_is_refused_with_the_reason(asker: Any, tls: Tls, why: str, three_tries: Any) -> None:
    options, says = REFUSED[why]
    ask = asker(tls.url(**options), timeout="30s")
    with three_tries(), pytest.raises(StoreUnavailable, match=says):
        await ask.run(ask.claims.inspect(ask.claims.key("s", "k")))


async def test_the_name_is_checked_unless_the_url_disables_it(tls: Tls) -> None:
    endpoint = endpoint_from_url(tls.url("127.0.0.1"))
    for client in (sync_client(endpoint), async_client(endpoint)):
        assert client.connection_pool.connection_kwargs["ssl_check_hostname"] is True
    named = endpoint_from_url(tls.url("127.0.0.1", more="&ssl_check_hostname=False"))
    with Gate(redis.Redis.from_url(tls.url("127.0.0.1"), ssl_check_hostname=False)) as gate:
        assert gate.first(new_id(), "1s")
    assert "ssl_check_hostname" in named.settings


def test_a_server_that_is_not_verified_is_warned_of(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Gate(tls.url("127.0.0.1", more="&ssl_cert_reqs=none")) as gate:
        assert gate.first(new_id(), "1s")
    assert [record.getMessage() for record in caplog.records] == ["link.unverified"]
    caplog.clear()
    Gate(tls.url())
    assert not caplog.records


async def test_what_waits_is_woken_over_tls(asker: Any, tls: Tls) -> None:
    ask = asker(tls.url(), timeout="20s")
    key = new_id().hex()
    claim = await asyncio.to_thread(ask.gate.claim, key)
    found = ask.gate.aio.claim(key) if ask.awaiting else await asyncio.to_thread(ask.gate.claim, key)
    other = await found if ask.awaiting else found
    waiting = asyncio.create_task(other.wait(30) if ask.awaiting else asyncio.to_thread(other.wait, 30))
    await asyncio.sleep(0)
    await asyncio.to_thread(claim.complete, "done")
    assert await waiting == "done"


async def test_a_silent_server_is_given_up_and_found_again(asker: Any, tls: Tls) -> None:
    # Given a connection that is in use
    ask = asker(tls.url(), timeout="1s")
    key = ask.claims.key("s", new_id().hex())
    await ask.run(ask.claims.inspect(key), within=30.0)
    with tls.raw() as raw:
        # When the server falls silent for a while, longer than a call is tried
        raw.execute_command("CLIENT", "PAUSE", "2500", "ALL")
    with pytest.raises(StoreUnavailable) as told:
        await ask.run(ask.claims.claim(key, new_id(), 1000, 1000))
    assert told.value.executed == "unknown"
    # Then it is asked again as soon as it speaks, on a new connection
    assert (await ask.run(ask.claims.inspect(key), within=30.0)).token >= 0


async def test_a_connection_that_was_cut_is_made_anew(asker: Any, tls: Tls) -> None:
    ask = asker(tls.url(), timeout="30s")
    key = ask.claims.key("s", new_id().hex())
    for _ in range(3):
        await ask.run(ask.claims.inspect(key))
        with tls.raw() as raw:
            raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert (await ask.run(ask.claims.inspect(key))).state == "absent"


async def test_a_connection_that_rested_is_used_again(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given connections that count as rested at once, so that each is looked at before it is used
    monkeypatch.setattr(blocking, "IDLE_CHECK_AFTER", -1.0)
    with Gate(tls.url(), timeout="20s") as gate:
        # When nothing came meanwhile but what TLS says for itself, Then it is not taken for the end
        assert len({gate.context.link.command("CLIENT", "ID") for _ in range(5)}) == 1
