"""The addresses that may be connected to.

A user who registers a URL chooses where this machine connects to. It must not reach what only this machine can reach
(server side request forgery).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from idemgate import InvalidArgument

__all__ = ["Address", "Reach", "literal"]

Address = IPv4Address | IPv6Address

# Written out, as IANA's registries of special addresses have them: `is_global` differs between versions of Python.
_CLOSED_4 = [
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",  # public by its number, but Azure's own services to a machine
    )
]  # fmt: skip
_OPEN_6 = IPv6Network("2000::/3")
"""All that is given out as global unicast; loopback, link-local, unique local, multicast lie outside."""
_CLOSED_6 = [
    ip_network(text)
    for text in (
        "2001::/23",      # protocols: Teredo (carries an IPv4 address), ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",      # 6to4: carries an IPv4 address
        "3fff::/20",      # documentation
    )
]  # fmt: skip
_NAT64 = IPv6Network("64:ff9b::/96")


class Reach:
    """The public addresses, and those of `allow`: networks such as "10.1.0.0/16", "127.0.0.1" or "fd00:1::/48"."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        if isinstance(allow, str):
            raise InvalidArgument("allow", allow, "is one text", 'Pass a list of networks, as in ["10.1.0.0/16"]')
        self._allowed = [_network(text) for text in allow]

    def refuses(self, address: str) -> str | None:
        """Why this address may not be connected to; None if it may. For an IPv6 address that stands for an IPv4 one,
        that one decides."""
        try:
            found = _meant(ip_address(address))
        except ValueError:
            return f"{address} is not an address"
        if any(found in network for network in self._allowed) or _public(found):
            return None
        return f"{address} is not a public address"


def _meant(address: Address) -> Address:
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address


def _public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _CLOSED_4)
    return address in _OPEN_6 and not any(address in network for network in _CLOSED_6)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise InvalidArgument("allow", text, str(error), 'Pass networks, as in ["10.1.0.0/16", "127.0.0.1"]') from None


def literal(host: str) -> str | None:
    """The address that a host is, in any of the forms that resolvers take ("127.1", "2130706433", "0x7f000001"); None
    for a name."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeEncodeError):
        return None
