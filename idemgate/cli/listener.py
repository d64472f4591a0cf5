"""A small HTTP server for what others ask regularly: probes and metrics. It answers GET and HEAD, each in a thread."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from idemgate.cli.arguments import split_address
from idemgate.core.text import event_log
from idemgate.errors import InvalidArgument

__all__ = ["Answer", "answer_problems", "listen"]

log: logging.Logger = event_log("idemgate.http")
REQUEST_WITHIN = 5.0
"""Seconds in which a client must send its request."""


class Answer(NamedTuple):
    """An answer. `body` is of the media type `type`."""

    status: HTTPStatus
    type: str
    body: bytes


def answer_problems(problems: list[str], status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE) -> Answer:
    """Return an answer of JSON: 200 without problems, else `status` with them."""
    body = json.dumps({"ok": not problems, "problems": problems}).encode() + b"\n"
    return Answer(status if problems else HTTPStatus.OK, "application/json", body)


def listen(option: str, address: str, answers: Mapping[str, Callable[[], Answer]]) -> ThreadingHTTPServer:
    """Return a server that answers these paths, and others with 404. Its `serve_forever` has to be called.

    Args:
        option: the option of the command line that named the address, for messages.
        address: where it listens: `PORT`, `HOST:PORT` or `[HOST]:PORT`. Port 0 means a free one.
        answers: the function for each path. Any thread calls it.

    Raises:
        InvalidArgument: the address is invalid, or another program has the port.
    """
    host, port = split_address(option, address)

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_WITHIN
        server_version, sys_version = "idemgate", ""

        def do_GET(self) -> None:
            answer = _answer(answers, self.path.partition("?")[0])
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer.body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name of http.server

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None: ...  # a client that went away

    try:
        return Server((host, port), Handler)
    except OSError as error:
        raise InvalidArgument(
            option, address, f"cannot listen there: {error.strerror or error}", "Name another"
        ) from error


def _answer(answers: Mapping[str, Callable[[], Answer]], path: str) -> Answer:
    if path not in answers:
        return answer_problems([f"there is only {', '.join(answers)}"], HTTPStatus.NOT_FOUND)
    try:
        return answers[path]()
    except Exception:
        log.exception("http.failed path=%s", path, extra={"path": path})
        return answer_problems(["see the log"], HTTPStatus.INTERNAL_SERVER_ERROR)
