"""Two apps for gunicorn that write a row for each run, and are killed where the request says.

IDEMGATE_STORE, IDEMGATE_NAMESPACE and IDEMGATE_DATABASE name where they store. A request has these headers:

- `x-now`: the time of the gate's clock.
- `x-die`: "before" the effect, after the "effect", "between" the response and its completion, "after" the completion
  (the response is not sent), "never", or a number of microseconds from the start.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any

from idemgate_http import IdempotencyKey, Response
from idemgate_http.wsgi import IdempotencyKeyWSGI

from idemgate import Gate
from idemgate.testing import Clock

DATABASE = os.environ["IDEMGATE_DATABASE"]
clock = Clock()
gate = Gate(os.environ["IDEMGATE_STORE"], namespace=os.environ["IDEMGATE_NAMESPACE"], clock=clock)
logging.getLogger("idemgate").setLevel("ERROR")
death = {"where": "never"}


def die(here: str) -> None:
    if here == death["where"]:
        os.kill(os.getpid(), signal.SIGKILL)


def begin(now: str, at: str) -> None:
    """Set the clock, and arm the death of this process."""
    clock.set(float(now))
    death["where"] = at
    if at.isdecimal():

        def kill_later() -> None:
            time.sleep(int(at) / 1e6)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill_later).start()


def run(key: str) -> bytes:
    """The effect: a row. Return its number."""
    die("before")
    with closing(sqlite3.connect(DATABASE, timeout=20)) as connection, connection:
        number = connection.execute("INSERT INTO payments (key) VALUES (?)", [key]).lastrowid
    die("effect")
    return b"%d" % (number or 0)


def redact(response: Response) -> Response:
    die("between")
    return response


OPTIONS: Any = {"gate": gate, "single_tenant": True, "redact": redact}


def _wsgi_app(environ: Any, start_response: Any) -> Any:
    number = run(environ["HTTP_IDEMPOTENCY_KEY"])
    start_response("201 Created", [("Content-Length", str(len(number))), ("Location", f"/p/{number.decode()}")])
    return [number]


_guarded_wsgi = IdempotencyKeyWSGI(_wsgi_app, **OPTIONS)


def wsgi(environ: Any, start_response: Any) -> Any:
    begin(environ["HTTP_X_NOW"], environ["HTTP_X_DIE"])

    def start(*args: Any) -> Any:
        die("after")
        return start_response(*args)

    return _guarded_wsgi(environ, start)


async def _asgi_app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    number = run(dict(scope["headers"])[b"idempotency-key"].decode())
    headers = [(b"content-length", b"%d" % len(number)), (b"location", b"/p/" + number)]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": number})


_guarded_asgi = IdempotencyKey(_asgi_app, **OPTIONS)


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    headers = dict(scope["headers"])
    begin(headers[b"x-now"].decode(), headers[b"x-die"].decode())

    async def send_message(message: Any) -> None:
        die("after")
        await send(message)

    await _guarded_asgi(scope, receive, send_message)
