"""The app: one route for each verb of the table, one for the snapshot, and the files of the page."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from idemgate.audit.snapshot import Snapshot
from idemgate.core import keys
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.errors import IdemgateError, InvalidArgument, StoreError, StoreUnavailable, TopicInUse
from idemgate.gate import Gate, check_gate
from idemgate.operate.acts import perform
from idemgate.operate.arguments import parse_given
from idemgate.operate.nouns import NOUNS
from idemgate.operate.overview import overview
from idemgate.operate.snapshot import take_snapshot
from idemgate.operate.table import VERBS
from idemgate.operate.values import STORED, to_json
from idemgate.operate.verb import Answer, Facts, Given, Verb
from idemgate.store.retry import is_refused
from idemgate.ui.access import Access, AccessCallback, Format, ask_access
from idemgate.ui.shield import LOCAL, Shield, check_hosts, error_answer

__all__ = ["app"]

FRESH = 1.0
"""Seconds for which a snapshot serves all who ask."""
MOST_BYTES = 16 * 2**20
"""The most bytes of a request: dead letters to import."""
_STATIC = Path(__file__).parent / "static"


def app(
    gate: Gate,
    *,
    access: AccessCallback,
    format: Format | None = None,  # noqa: A002
    hosts: Collection[str] = LOCAL,
) -> Starlette:
    """Return the page of a namespace as an app that Starlette and FastAPI can mount.

    Args:
        gate: a gate of the namespace. The app does not close it.
        access: returns for each request who sent it and what they may do. It is the only check of people.
        format: shows stored values. Without it the page shows them as JSON. It hides nothing of `dead export`.
        hosts: the host names under which the page is reached, without ports.

    Raises:
        InvalidArgument: a host is invalid.
    """
    check_gate(gate)
    api = _Api(gate, access, format)
    routes = list[Route]()
    for verb in VERBS:
        name, methods = f"{verb.noun}/{verb.name}", ["POST" if verb.changes else "GET"]
        routes += [Route(f"/verb/{name}", api.endpoint(verb), methods=methods)]
        routes += [Route(f"/command/{name}", api.command_endpoint(verb), methods=["POST"])]
    return Starlette(
        routes=[
            Mount("/api", routes=[Route("/verbs", api.list_verbs), Route("/snapshot", api.show_snapshot), *routes]),
            Mount("/", StaticFiles(directory=_STATIC, html=True)),
        ],
        middleware=[Middleware(Shield, hosts=check_hosts(hosts))],
        exception_handlers={IdemgateError: _answer_error, HTTPException: _answer_http_error},
    )


class _Api:
    """The routes of one gate."""

    def __init__(self, gate: Gate, access: AccessCallback, format: Format | None) -> None:  # noqa: A002
        self._gate = gate
        self._access = access
        self._format = format
        self._snapshots = _Snapshots(gate)

    async def list_verbs(self, request: Request) -> Response:
        """Answer who asks, and what the table of verbs holds for them."""
        access = await self._check(request)
        may_change = await run_in_threadpool(self._ask_may_change)
        return _json_answer({
            "namespace": self._gate.namespace, "who": access.who, "read_only": not may_change, "nouns": NOUNS,
            "verbs": [_describe(verb, access.allows(verb) and (may_change or not verb.changes)) for verb in VERBS],
        })  # fmt: skip

    async def show_snapshot(self, request: Request) -> Response:
        """Answer the newest snapshot, or 304 if nothing but its time changed."""
        await self._check(request)
        body, etag = await run_in_threadpool(self._snapshots.get)
        headers = {"ETag": etag} | _NO_STORE
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")

    def endpoint(self, verb: Verb) -> Any:
        """Return the function of the route of a verb."""

        async def answer(request: Request) -> Response:
            access = await self._check(request)
            if not access.allows(verb):
                raise HTTPException(403, f"{one_line(access.who)} may not `{verb.title}`")
            asked = await _read_body(request) if verb.changes else {"arguments": _read_query(verb, request)}
            return await run_in_threadpool(self._run, verb, access, asked)

        return answer

    def command_endpoint(self, verb: Verb) -> Any:
        """Return the function that answers the command line of a verb. What is missing or wrong is left as it is."""

        async def answer(request: Request) -> Response:
            await self._check(request)
            return _json_answer(verb.write_command((await _read_body(request))["arguments"]))

        return answer

    async def _check(self, request: Request) -> Access:
        access = await ask_access(self._access, request)
        if access is None:
            raise HTTPException(401, "log in, or give a token that the page knows")
        return access

    def _run(self, verb: Verb, access: Access, asked: Mapping[str, Any]) -> Response:
        given = parse_given(verb, asked["arguments"])
        if verb.changes and asked["dry_run"]:
            assert verb.look is not None
            return self._answer(verb.look(self._gate, given))
        if verb.loses:
            _check_confirmed(verb, given, asked["confirm"])
        try:
            return self._answer(perform(self._gate, verb, given, who=access.who, why=asked.get("why", "")))
        finally:
            if verb.changes:
                self._snapshots.expire()

    def _answer(self, answer: Answer) -> Response:
        if isinstance(answer, Iterator):
            first = [*islice(answer, 1)]  # what cannot be read is an error, and no empty file
            rows = _lines(chain(first, answer))
            return StreamingResponse(rows, headers=_NO_STORE, media_type="application/x-ndjson")
        return _json_answer(answer if self._format is None else _reformat(answer, self._format))

    def _ask_may_change(self) -> bool:
        """Return False if the access list of the gate's user refuses to record acts, without which nothing changes."""
        try:
            self._gate.context.link.command("LTRIM", keys.acts(self._gate.namespace), 0, -1)  # changes nothing
        except StoreError as error:
            return not is_refused(error)
        return True


class _Snapshots:
    """The newest snapshot, which all who ask within a second share."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._lock = Lock()
        self._until = 0.0
        self._answer = (b"", "")
        self._snapshot: Snapshot | None = None

    def get(self) -> tuple[bytes, str]:
        """Return its JSON and its ETag. Raises StoreError."""
        with self._lock:
            if monotonic() >= self._until:
                self._snapshot = take_snapshot(self._gate, self._snapshot)
                facts = overview(self._snapshot)
                body = json.dumps(facts).encode()
                constant = json.dumps(facts | {"taken_at": None}).encode()
                self._answer = body, f'"{blake2b(constant, digest_size=16).hexdigest()}"'
                self._until = monotonic() + FRESH
            return self._answer

    def expire(self) -> None:
        """Let the next one who asks see what changed."""
        self._until = 0.0


# -- requests ---------------------------------------------------------------------------------------------------------


def _read_query(verb: Verb, request: Request) -> dict[str, Any]:
    """Return the arguments of a verb that reads. A flag is "true" or "false"."""
    kinds = {one.name: one.kind for one in verb.parameters}
    query = request.query_params
    return {
        name: query.getlist(name) if kinds.get(name) == "texts" else _flag(name, value)
        if kinds.get(name) == "flag" else value
        for name, value in query.items()
    }  # fmt: skip


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidArgument(name, text, "is not true or false", "Send one of them")
    return text == "true"


_BODY: Mapping[str, type] = {"arguments": dict, "dry_run": bool, "why": str, "confirm": str}


async def _read_body(request: Request) -> dict[str, Any]:
    """Return what a change is asked for with: arguments, dry_run, why, confirm."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES:,} bytes. Use the command line: `idemgate dead import`")
    try:
        asked: Any = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", bytes(body[:100]), f"not JSON: {error}", "Send an object") from None
    if not isinstance(asked, dict):
        raise InvalidArgument("body", asked, "not an object", 'Send {"arguments": {...}}')
    for name, value in cast("dict[str, Any]", asked).items():
        if name not in _BODY or not isinstance(value, _BODY[name]):
            fix = "Send arguments (an object), dry_run (a bool), why and confirm (texts)"
            raise InvalidArgument(name, value, "not a part of a request", fix)
    return {name: kind() for name, kind in _BODY.items()} | cast("dict[str, Any]", asked)


def _check_confirmed(verb: Verb, given: Given, typed: str) -> None:
    """Refuse to lose data unless the name of what loses it was typed."""
    assert verb.subject is not None
    if typed != given[verb.subject]:
        fix = f"Look with dry_run, then send the {verb.subject} again as confirm"
        raise InvalidArgument("confirm", typed, f"`{verb.title}` loses data or runs work again", fix)


# -- answers ----------------------------------------------------------------------------------------------------------

_NO_STORE = {"Cache-Control": "no-store"}


def _json_answer(answer: Any) -> Response:
    body = json.dumps(answer, default=to_json).encode()
    return Response(body, headers=_NO_STORE, media_type="application/json")


def _lines(rows: Iterator[Facts]) -> Iterator[bytes]:
    for row in rows:
        yield json.dumps(row, default=to_json).encode() + b"\n"


def _reformat(answer: Any, show: Format) -> Any:
    """Return an answer with stored values as `show` returns them."""
    if isinstance(answer, Mapping):
        facts = cast("Mapping[str, Any]", answer).items()
        return {name: _show(show, name, value) if name in STORED else _reformat(value, show) for name, value in facts}
    if isinstance(answer, list | tuple):
        return [_reformat(one, show) for one in cast("Sequence[Any]", answer)]
    return answer


def _show(show: Format, name: str, value: Any) -> Any:
    try:
        return show(name, value)
    except Exception as error:  # noqa: BLE001 - a function of the user may raise anything
        return f"<format= raised {type(error).__name__}>"


def _describe(verb: Verb, allowed: bool) -> dict[str, Any]:
    return {
        "noun": verb.noun, "name": verb.name, "about": verb.about, "changes": verb.changes, "loses": verb.loses,
        "subject": verb.subject, "allowed": allowed, "parameters": [asdict(one) for one in verb.parameters],
    }  # fmt: skip


async def _answer_error(_: Request, error: Exception) -> Response:
    """Answer an error of the library with its text."""
    status = (
        400 if isinstance(error, InvalidArgument)
        else 403 if is_refused(error)
        else 409 if isinstance(error, TopicInUse)
        else 503 if isinstance(error, StoreUnavailable)
        else 502
    )  # fmt: skip
    return error_answer(status, type(error).__name__, one_line(error))


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_answer(error.status_code, "Refused" if error.status_code in (401, 403) else "Request", error.detail)
