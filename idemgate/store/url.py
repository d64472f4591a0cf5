"""Parse a URL into an endpoint. No error quotes what may be a password."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from redis import connection

from idemgate.errors import InvalidArgument, NotConfigured
from idemgate.store.endpoint import Endpoint, connection_settings

__all__ = ["endpoint_from_url"]

_SCHEMES = "redis://, rediss://, unix://, redis+cluster://, rediss+cluster://, redis+sentinel://, rediss+sentinel://, embedded://"


_PARSERS = cast("dict[str, Callable[[str], Any]]", cast(Any, connection).URL_QUERY_ARGUMENT_PARSERS)
_BOOLEANS = ("true", "t", "yes", "y", "1", "false", "f", "no", "n", "0")
_OPTION_FIXES = {
    "ssl_min_version": "Write ssl_min_version=771 for TLS 1.2, or 772 for TLS 1.3",
    "ssl_check_hostname": "Write ssl_check_hostname=true or false",
    "db": "Write a number: db=0",
}
_ESCAPE = "Write / # ? @ : in a password as %2F %23 %3F %40 %3A"


def endpoint_from_url(url: str) -> Endpoint:
    """Return the endpoint of a URL.

    redis-py parses redis, rediss and unix URLs. This module parses `redis+cluster://h1:p1,h2:p2` and
    `redis+sentinel://h1:p1,h2:p2/service/db`; the schemes with rediss use TLS.

    Raises:
        InvalidArgument: the URL is malformed, or a password in it is not escaped.
        NotConfigured: a setting in the query cannot be used.
    """
    if _has_misplaced_at(url):
        raise _invalid(url, "has an @ behind a / ? or #", _ESCAPE)
    try:
        return _parse(url)
    except NotConfigured as error:  # the error names a setting, which may be part of an unescaped password
        refusal = error
    if "@" in url.partition("?")[2]:  # raised outside the handler: inside, it would keep `error` as its context
        raise _invalid(url, "has an @ behind a ?", _ESCAPE)
    raise refusal


def _has_misplaced_at(url: str) -> bool:
    """Return whether an @ follows a / ? or #. Then part of a password would be taken for the host, and shown."""
    scheme, _, rest = url.partition("://")
    # In a URL of several nodes the last @ before a ? ends the password.
    before = re.split(r"[?]" if "+" in scheme else r"[/?#]", rest, maxsplit=1)[0]
    path, _, query = rest[len(before) :].partition("?")
    if "@" not in before:
        return bool(before) and "@" in path + query
    are_named = all("=" in part.partition("@")[0] for part in query.split("&") if "@" in part)
    return not are_named or ("@" in path and scheme.lower() != "unix")


def _parse(url: str) -> Endpoint:
    base, _, topology = url.partition("://")[0].lower().partition("+")
    is_known = base in ("redis", "rediss", "unix") and topology in ("", "cluster", "sentinel")
    if not is_known or (base == "unix" and topology):
        raise _invalid(url, "not a URL of a store", _suggest_url(url) or f"Use one of {_SCHEMES}")
    if topology:
        return _parse_node_list(url, base, topology)
    if (name := _find_invalid_option(url)) is not None:
        raise _invalid(url, f"its option {name} has an invalid value", _OPTION_FIXES.get(name, f"Correct {name}="))
    settings: dict[str, Any] | None = None
    with suppress(ValueError):  # its text may quote part of the password
        settings = cast("dict[str, Any]", cast(Any, connection).parse_url(url))
    if settings is None:
        raise _invalid(url, "not a URL that redis-py can read", _ESCAPE)
    if base != "unix" and not _has_valid_database(url, settings):  # redis-py parses /abc as 0, and /1/2 as 12
        raise _invalid(url, "its path is not a database number", f"Use {base}://host:port/0. {_ESCAPE}")
    return Endpoint("single", connection_settings(settings, "url"))


def _find_invalid_option(url: str) -> str | None:
    """Return the name of an option whose value is invalid. It is a name that redis-py knows, so no part of a secret."""
    for name, value in parse_qsl(url.partition("?")[2]):
        if name == "ssl_check_hostname" and value.lower() not in _BOOLEANS:
            return name  # redis-py would take any text for true
        try:
            _PARSERS.get(name, str)(value)
        except (TypeError, ValueError):
            return name
    return None


def _has_valid_database(url: str, settings: dict[str, Any]) -> bool:
    """Return whether the database is a number. `?db=` takes precedence over the path."""
    path = "" if "db" in parse_qs(urlsplit(url).query) else unquote(urlsplit(url).path).strip("/")
    return (not path or (path.isascii() and path.isdigit())) and settings.get("db", 0) >= 0


def _parse_node_list(url: str, base: str, topology: str) -> Endpoint:
    rest, _, query = url.partition("://")[2].partition("?")
    userinfo, _, location = rest.rpartition("@")
    hosts, _, path = location.partition("/")
    if (name := _find_invalid_option(url)) is not None:
        raise _invalid(url, f"its option {name} has an invalid value", _OPTION_FIXES.get(name, f"Correct {name}="))
    settings: dict[str, Any] = {
        name: _PARSERS[name](value) if name.startswith("ssl") and name in _PARSERS else value
        for name, value in parse_qsl(query)
    }
    if userinfo:
        username, _, password = userinfo.partition(":")
        settings |= {"username": unquote(username) or None, "password": unquote(password)}
    if base == "rediss":
        settings["connection_class"] = connection.SSLConnection
    nodes = tuple(_node(url, host, 26379 if topology == "sentinel" else 6379) for host in hosts.split(","))
    if topology == "cluster":
        return Endpoint("cluster", connection_settings(settings, "url", nodes=True), nodes)
    service, _, number = path.partition("/")
    if not service:
        raise _invalid(url, "no service named", "Use redis+sentinel://host:port/service")
    number = number or settings.get("db", "0")
    if not (number.isascii() and number.isdigit()):
        raise _invalid(url, f"{number!r} is not a database number", "Use redis+sentinel://host:port/service/0")
    return Endpoint(
        "sentinel", connection_settings(settings, "url", nodes=True) | {"db": int(number)}, nodes, unquote(service)
    )


_NODE = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:@/\[\]]+))(?::(\d{1,5}))?")


def _node(url: str, text: str, port: int) -> tuple[str, int]:
    match = _NODE.fullmatch(text)
    if not match or int(match[3] or port) > 65_535:
        raise _invalid(url, "not a list of host:port", "Separate nodes by commas, as in h1:6379,h2:6379")
    return match[1] or match[2], int(match[3] or port)


_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
_ADDRESS = re.compile(rf"({_HOST.pattern})(:[0-9]{{1,5}})?(/[0-9]{{1,3}})?")


def _suggest_url(url: str) -> str | None:
    """Return a suggestion for a host or a path without a scheme; None if the text may hold a secret."""
    found = _ADDRESS.fullmatch(url)
    if found and (found[2] or found[3] or "." in found[1] or found[1] == "localhost"):  # a word alone may be a secret
        return f"Did you mean redis://{found[1]}{found[2] or ':6379'}{found[3] or ''}?"
    if re.fullmatch(r"/[\w./-]+", url):
        return f"Did you mean unix://{url}?"
    return None


_PLAIN = re.compile(r"[\w.\[\]-]*(:\d+)?(,[\w.\[\]-]+(:\d+)?)*(/[\w./-]*)?")


def _invalid(url: str, problem: str, fix: str) -> InvalidArgument:
    """Return an InvalidArgument that shows only the parts of the URL that cannot be secret.

    A password may stand before the last @, or in the query, or behind an unescaped / ? or #.
    """
    scheme, separator, rest = url.partition("://")
    location = rest.rpartition("@")[2]
    may_hold_password = "@" in re.sub(r"^[^/?#]*", "", rest)
    location = re.sub(r"[?#].*", "", location)
    location = location if separator and not may_hold_password and _PLAIN.fullmatch(location) else "***"
    userinfo = "***@" if "@" in rest else ""
    shown = f"{scheme}://{userinfo}{location}" if separator else url if _suggest_url(url) else "***"
    return InvalidArgument("url", shown, problem, fix)
