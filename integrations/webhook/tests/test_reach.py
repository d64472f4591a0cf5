"""Which addresses may be reached; judged against Python's own table too."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from idemgate_webhook import Reach

from idemgate import InvalidArgument
from tests.for_each import for_each

PUBLIC = [
    "93.184.216.34",
    "1.1.1.1",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700:4700::1111",
    "64:ff9b::101:101",
    "::ffff:1.1.1.1",
]
CLOSED = [
    "127.0.0.1", "127.255.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1",
    "169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001::1",
    "2001:db8::1", "2002:7f00:1::", "3fff::1", "64:ff9b:1::1",
    "::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "localhost", "", "127.1",
]  # fmt: skip


@for_each("address", PUBLIC)
def test_public(address: str) -> None:
    assert Reach().refuses(address) is None


@for_each("address", CLOSED)
def test_closed(address: str) -> None:
    assert address in (Reach().refuses(address) or "nothing at all")


@given(st.ip_addresses())
def test_nothing_is_open_that_python_calls_closed(address: IPv4Address | IPv6Address) -> None:
    carries_another = address in IPv6Network("::ffff:0:0/96") or address in IPv6Network("64:ff9b::/96")  # see below
    if Reach().refuses(str(address)) is None and not carries_another:
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_reserved


@given(st.ip_addresses(v=4))
def test_an_address_in_an_address_is_judged_as_itself(address: IPv4Address) -> None:
    plain = Reach().refuses(str(address)) is None
    for around in ("::ffff:0:0", "64:ff9b::"):
        inside = IPv6Address(int(IPv6Address(around)) | int(address))
        assert (Reach().refuses(str(inside)) is None) == plain


def test_what_is_allowed_is_open_and_nothing_beside_it() -> None:
    reach = Reach(["10.1.0.0/16", "127.0.0.1", "fd00:1::/48"])
    for address in ("10.1.2.3", "127.0.0.1", "::ffff:10.1.2.3", "fd00:1::5"):
        assert reach.refuses(address) is None
    for address in ("10.2.0.1", "127.0.0.2", "fd00:2::5", "2002:a01:203::"):
        assert reach.refuses(address) is not None


@pytest.mark.parametrize("allow", ["10.0.0.0/8", ["10.0.0.1/8"], ["localhost"]])
def test_what_is_no_network_is_refused(allow: object) -> None:
    with pytest.raises(InvalidArgument, match="allow="):
        Reach(allow)  # type: ignore[arg-type]
