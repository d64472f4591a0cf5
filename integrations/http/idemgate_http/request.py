"""The request as every face shows it to the core: method, path, query and headers. The body is read later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar, overload

from idemgate.core.text import one_line

__all__ = ["Headers", "Request", "spell_media_type"]

T = TypeVar("T")
_PARAMETER = re.compile(r';([^=;]*)(?:=\s*("(?:[^"\\]|\\.)*"\s*(?=;|$)|[^;]*))?')
_ESCAPE = re.compile(r"\\(.)")
_TOKEN = re.compile(r"[^\s\";\\]+")
_QUOTED = re.compile(r'["\\]')
_UTF_8 = (["utf-8"], ["utf8"])


class Headers(Mapping[str, str]):
    """The headers of a request by name. Case does not matter; fields of one name are joined by ", "."""

    __slots__ = ("_values",)

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        values: dict[str, str] = {}
        for name, value in pairs:
            lower = name.lower()
            values[lower] = f"{values[lower]}, {value}" if lower in values else value
        self._values = values

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        """Return a header, or `default`. `get` of a Mapping catches a KeyError, which costs more."""
        return self._values.get(name.lower(), default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Headers {sorted(self._values)}>"  # not the values, which may be secrets


class Request:
    """A request, as it is passed to `caller`, `required`, `applies_to` and `fingerprint`.

    Attributes:
        method: in upper case.
        path: the whole decoded path, with the prefix under which the app is mounted.
        query: the query string as it was sent, without the question mark.
        headers: by name. Case does not matter, and a missing one raises KeyError.
        raw: what the framework has: the `scope` of ASGI, the `environ` of WSGI, or the HttpRequest of Django. The
            authentication middleware leaves its user there.
    """

    __slots__ = ("headers", "method", "path", "query", "raw")

    def __init__(self, method: str, path: str, query: bytes, headers: Headers, raw: Any) -> None:
        self.method: str = method
        self.path: str = path
        self.query: bytes = query
        self.headers: Headers = headers
        self.raw: Any = raw

    def __repr__(self) -> str:
        return f"<Request {one_line(self.method)} {self.path!r}>"

    @property
    def content_length(self) -> int | None:
        """The announced length of the body, or None if there is none or it is no number."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isascii() and value.isdecimal() else None

    @property
    def media_type(self) -> str:
        """The Content-Type in one spelling: `application/json` for "Application/JSON; charset=UTF-8".

        Parameters are in the order of their names. UTF-8 is left out, as a missing charset means it. So is the
        boundary of a multipart body. "" if there is no Content-Type.
        """
        return spell_media_type(self.headers.get("content-type", ""), with_boundary=False)

    @property
    def content_encoding(self) -> str:
        """The Content-Encoding in one spelling: "gzip,br" for "GZip, br". "" if there is none."""
        return self.headers.get("content-encoding", "").lower().replace(" ", "")


@lru_cache(maxsize=64)
def spell_media_type(content_type: str, *, with_boundary: bool) -> str:
    """Return a Content-Type in one spelling, with or without the boundary of a multipart body."""
    kind, semicolon, rest = content_type.partition(";")
    kind = kind.strip().lower()
    parameters: list[tuple[str, str | None]] = []
    for found in _PARAMETER.finditer(semicolon + rest):
        name, value = found[1].strip().lower(), found[2]
        text = None if value is None else _unquote(value.strip())
        if name == "charset" and text is not None:
            text = text.lower().strip("'")
        if name or text is not None:
            parameters.append((name, text))
    left_out = {"boundary"} if kind.startswith("multipart/") and not with_boundary else set[str]()
    if [text for name, text in parameters if name == "charset"] in _UTF_8:  # of two charsets frameworks read either
        left_out.add("charset")
    kept = [(name, text) for name, text in parameters if name not in left_out]
    kept.sort(key=itemgetter(0))  # those of one name stay in their order
    return ";".join([kind, *(name if text is None else f"{name}={_quote(text)}" for name, text in kept)])


def _unquote(value: str) -> str:
    """Return the text of a value, which may be in quotes."""
    is_quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return _ESCAPE.sub(r"\1", value[1:-1]) if is_quoted else value


def _quote(value: str) -> str:
    """Return a value in quotes, if it could be taken for several parameters without them."""
    return value if _TOKEN.fullmatch(value) else '"' + _QUOTED.sub(r"\\\g<0>", value) + '"'
