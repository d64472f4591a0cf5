"""A URL or a TLS setting that cannot work is refused with its name, its value and the fix; the server is not blamed."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate, InvalidArgument, StoreUnavailable, configure
from idemgate.cli.doctor.examine import Namespace
from idemgate.store.url import endpoint_from_url
from tests.cluster import unused_ports
from tests.conftest import PASSWORD
from tests.for_each import for_each

Make = Callable[[str], object]


@for_each(
    ("url", "meant"),
    [
        ("localhost:6379", "redis://localhost:6379"),
        ("localhost", "redis://localhost:6379"),
        ("cache.internal/2", "redis://cache.internal:6379/2"),
        ("127.0.0.1:7000/0", "redis://127.0.0.1:7000/0"),
        ("[::1]:6379", "redis://[::1]:6379"),
        ("/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
@for_each("make", [Gate, configure])
def test_an_address_without_a_scheme_is_answered_with_the_url(make: Make, url: str, meant: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        make(url)
    assert str(refused.value) == f"url={url!r}: not a URL of a store. Did you mean {meant}?"
    endpoint_from_url(meant)


@for_each("url", [PASSWORD, f"{PASSWORD}@host:1", f"user:{PASSWORD}@host", "redis:/localhost", "", "http://x"])
def test_text_that_may_be_a_secret_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"Use one of redis://") as refused:
        Gate(url)
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("url", [5, b"redis://:secret@host", redis.ConnectionPool(), None])
def test_a_store_of_another_type_is_refused_and_not_shown(url: Any) -> None:
    if url is None:
        Gate(url)
        return
    with pytest.raises(InvalidArgument, match=r"store=<class .*neither a URL nor a client .*Pass 'redis://") as refused:
        Gate(url)
    assert "secret" not in str(refused.value)


BAD_SETTINGS = [
    ("ssl_cert_reqs=requird", r"ssl_cert_reqs='requird': .*Use one of 'required'"),
    ("ssl_foo=1", r"ssl_foo='1': no TLS setting\. Use one of .*ssl_ca_certs"),
    ("ssl_check_hostname=maybe", r"its option ssl_check_hostname has an invalid value\. Write ssl_check_hostname=true"),
    ("ssl_min_version=TLSv1.2", r"its option ssl_min_version has an invalid value\. Write ssl_min_version=771"),
    ("ssl_min_version=5", r"ssl_min_version=5: no version of TLS\. Use 771"),
    ("ssl_ciphers=NONE9", r"ssl_ciphers='NONE9': names no cipher"),
    ("ssl_keyfile=/key.pem", r"ssl_keyfile='/key\.pem': a key without a certificate\. Add ssl_certfile="),
]


@for_each(("query", "text"), BAD_SETTINGS)
@for_each("scheme", ["rediss://h", "rediss+cluster://h1,h2", "rediss+sentinel://h1,h2/service"])
def test_a_setting_that_cannot_work_is_refused_when_the_gate_is_made(scheme: str, query: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Gate(f"{scheme}?{query}")


@pytest.mark.parametrize("scheme", ["redis://h", "redis+cluster://h", "redis+sentinel://h/service", "unix:///s.sock"])
def test_tls_settings_without_tls_are_refused(scheme: str) -> None:
    with pytest.raises(InvalidArgument, match=r"ssl_ca_certs='/ca\.pem': the connection has no TLS\. Write rediss://"):
        Gate(f"{scheme}?ssl_ca_certs=/ca.pem")


def test_a_client_is_checked_too() -> None:
    with pytest.raises(InvalidArgument, match="ssl_ciphers='NONE9'"):
        Gate(redis.Redis("h", ssl=True, ssl_ciphers="NONE9"))
    Gate(redis.Redis("h", ssl=True, ssl_min_version=ssl.TLSVersion.TLSv1_3, ssl_cert_reqs=ssl.CERT_REQUIRED))


@pytest.mark.parametrize("word", ["false", "False", "no", "0"])
def test_a_switch_of_a_list_of_nodes_means_what_it_says(word: str) -> None:
    for scheme in ("rediss://h", "rediss+cluster://h", "rediss+sentinel://h/service"):
        assert endpoint_from_url(f"{scheme}?ssl_check_hostname={word}").settings["ssl_check_hostname"] is False


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path"])
def test_a_missing_file_is_named_at_the_first_use(name: str, tmp_path: Path) -> None:
    # Given a gate whose file is not there yet
    beside = f"&ssl_certfile={__file__}" if name == "ssl_keyfile" else ""
    url = f"rediss://127.0.0.1:1?{name}={tmp_path}/absent{beside}"
    with Gate(url, timeout="50ms") as gate:
        # Then each use names it, also that of the doctor
        for use in (lambda: gate.first("k", "1h"), lambda: gate.topic("t").trigger("k"), lambda: Namespace(url, "n")):
            with pytest.raises(InvalidArgument, match=rf"{name}='{tmp_path}/absent'"):
                use()


async def test_a_missing_file_is_named_by_asyncio(tmp_path: Path) -> None:
    gate = Gate(f"rediss://127.0.0.1:1?ssl_ca_certs={tmp_path}/absent", timeout="50ms")
    with pytest.raises(InvalidArgument, match=r"ssl_ca_certs=.*absent': cannot be read \(No such file"):
        await gate.aio.first("k", "1h")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (f"ssl_ca_certs={__file__}", r"ssl_ca_certs='.*\.py': holds no certificate"),
        (f"ssl_certfile={__file__}", r"ssl_certfile='.*\.py': the certificate and its key cannot be loaded"),
        (
            f"ssl_certfile={__file__}&ssl_keyfile={__file__}",
            r"ssl_keyfile='.*\.py': .*cannot be loaded .*ssl_password=",
        ),
        ("ssl_ca_data=abc", r"ssl_ca_data='abc': holds no certificate"),
        ("ssl_ca_certs=/proc/self", r"ssl_ca_certs='/proc/self': cannot be read \(Is a directory"),
    ],
)
def test_a_file_of_another_kind_is_named_at_the_first_use(query: str, text: str) -> None:
    with Gate(f"rediss://127.0.0.1:1?{query}", timeout="50ms") as gate, pytest.raises(InvalidArgument, match=text):
        gate.first("k", "1h")


async def test_a_refused_connection_says_how_to_start_a_server(nobody: Any, three_tries: Any) -> None:
    with three_tries(), pytest.raises(StoreUnavailable, match=r"No server listens there: .*`idemgate server`"):
        await nobody.first("k", "1h")


@pytest.fixture(params=["blocking", "awaiting"])
def nobody(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Both forms of a gate at an address without a server."""
    from tests.conftest import Awaited

    (port,) = unused_ports(1)
    gate = Gate(f"redis://127.0.0.1:{port}")
    return gate.aio if request.param == "awaiting" else Awaited(gate)


def test_a_socket_that_is_not_there_says_so_too(tmp_path: Path, three_tries: Any) -> None:
    with (
        three_tries(),
        Gate(f"unix://{tmp_path}/absent") as gate,
        pytest.raises(StoreUnavailable, match="idemgate server"),
    ):
        gate.first("k", "1h")


def test_other_failures_do_not_suggest_a_server() -> None:
    with Gate("redis://no.such.host.invalid:1", timeout="50ms") as gate, pytest.raises(StoreUnavailable) as told:
        gate.first("k", "1h")
    assert "idemgate server" not in str(told.value)
