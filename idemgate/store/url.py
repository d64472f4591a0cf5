"""A URL as an endpoint. No error quotes what may be a password."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from redis import connection

from idemgate.errors import InvalidArgument, NotConfigured
from idemgate.store.endpoint import Endpoint, kept

__all__ = ["of_url"]

_SCHEMES = "redis://, rediss://, unix://, redis+cluster://, rediss+cluster://, redis+sentinel://, rediss+sentinel://, embedded://"


_ESCAPE = "Write / # ? @ : in a password as %2F %23 %3F %40 %3A"


def of_url(url: str) -> Endpoint:
    """redis, rediss and unix URLs as redis-py reads them; redis+cluster://h1:p1,h2:p2; redis+sentinel://h1:p1,h2:p2/service/db."""
    if _astray(url):
        raise _bad(url, "has an @ behind a / ? or #", _ESCAPE)
    try:
        return _of_url(url)
    except NotConfigured as error:  # it names a setting, which may be a part of a password with a ? in it
        refused = error
    if "@" in url.partition("?")[2]:  # raised out here, since an error keeps the one during which it was raised
        raise _bad(url, "has an @ behind a ?", _ESCAPE)
    raise refused


def _astray(url: str) -> bool:
    """Whether what stands before the first / ? # is not the whole of what was to stand before the last @: a part of a
    password would be taken for the host, and shown."""
    scheme, _, rest = url.partition("://")
    # In a URL of many nodes the last @ before a ? ends the password.
    before = re.split(r"[?]" if "+" in scheme else r"[/?#]", rest, maxsplit=1)[0]
    path, _, query = rest[len(before) :].partition("?")
    if "@" not in before:
        return bool(before) and "@" in path + query
    named = all("=" in part.partition("@")[0] for part in query.split("&") if "@" in part)
    return not named or ("@" in path and scheme.lower() != "unix")


def _of_url(url: str) -> Endpoint:
    base, _, topology = url.partition("://")[0].lower().partition("+")
    known = base in ("redis", "rediss", "unix") and topology in ("", "cluster", "sentinel")
    if not known or (base == "unix" and topology):
        raise _bad(url, "not a URL of a store", f"Use one of {_SCHEMES}")
    if topology:
        return _of_many(url, base, topology)
    settings: dict[str, Any] | None = None
    with suppress(ValueError):  # its text may quote a part of the password
        settings = cast("dict[str, Any]", cast(Any, connection).parse_url(url))
    if settings is None:
        raise _bad(url, "not a URL that redis-py can read", _ESCAPE)
    if base != "unix" and not _names_database(url, settings):  # redis-py takes /abc for 0, and /1/2 for 12
        raise _bad(url, "its path is not a database number", f"Use {base}://host:port/0. {_ESCAPE}")
    return Endpoint("single", kept(settings, "url"))


def _names_database(url: str, settings: dict[str, Any]) -> bool:
    """`?db=` goes before the path."""
    path = "" if "db" in parse_qs(urlsplit(url).query) else unquote(urlsplit(url).path).strip("/")
    return (not path or (path.isascii() and path.isdigit())) and settings.get("db", 0) >= 0


def _of_many(url: str, base: str, topology: str) -> Endpoint:
    rest, _, query = url.partition("://")[2].partition("?")
    userinfo, _, location = rest.rpartition("@")
    hosts, _, path = location.partition("/")
    settings: dict[str, Any] = dict(parse_qsl(query))
    if userinfo:
        username, _, password = userinfo.partition(":")
        settings |= {"username": unquote(username) or None, "password": unquote(password)}
    if base == "rediss":
        settings["connection_class"] = connection.SSLConnection
    nodes = tuple(_node(url, host, 26379 if topology == "sentinel" else 6379) for host in hosts.split(","))
    if topology == "cluster":
        return Endpoint("cluster", kept(settings, "url", nodes=True), nodes)
    service, _, number = path.partition("/")
    if not service:
        raise _bad(url, "no service named", "Use redis+sentinel://host:port/service")
    number = number or settings.get("db", "0")
    if not (number.isascii() and number.isdigit()):
        raise _bad(url, f"{number!r} is not a database number", "Use redis+sentinel://host:port/service/0")
    return Endpoint("sentinel", kept(settings, "url", nodes=True) | {"db": int(number)}, nodes, unquote(service))


_NODE = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:@/\[\]]+))(?::(\d{1,5}))?")


def _node(url: str, text: str, port: int) -> tuple[str, int]:
    found = _NODE.fullmatch(text)
    if not found or int(found[3] or port) > 65_535:
        raise _bad(url, "not a list of host:port", "Separate nodes by commas, as in h1:6379,h2:6379")
    return found[1] or found[2], int(found[3] or port)


_PLAIN = re.compile(r"[\w.\[\]-]*(:\d+)?(,[\w.\[\]-]+(:\d+)?)*(/[\w./-]*)?")


def _bad(url: str, problem: str, fix: str) -> InvalidArgument:
    """Shows of the URL what surely is no secret. A password may stand before the last @, in the query, and, where its
    / ? # are not escaped, after them."""
    scheme, separator, rest = url.partition("://")
    location = rest.rpartition("@")[2]
    secret = "@" in re.sub(r"^[^/?#]*", "", rest)
    location = re.sub(r"[?#].*", "", location)
    shown = location if separator and not secret and _PLAIN.fullmatch(location) else "***"
    userinfo = "***@" if "@" in rest else ""
    return InvalidArgument("url", f"{scheme}://{userinfo}{shown}" if separator else "***", problem, fix)
