"""What the HTTP middleware adds to a request: the same app without it and with it, in one process, in turns.

The app answers at once with 30 bytes of JSON. No socket of a web server is involved, so the difference is the
middleware's and the store's.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.machine import CLIENT, pin
from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import port_of, spent, started
from idemgate import Gate

__all__ = ["STEPS", "run"]

STEPS = ("without", "passed on", "first", "replay")
"""No middleware; the middleware and no header; a new key; a key that is done."""
BODY = b'{"order": 7, "amount": 500}'
ANSWER = b'{"payment": 42, "state": "ok"}'
TASKS = 100
_numbers = itertools.count()


def run(plan: Plan) -> list[Row]:
    """The rows: `who` is the face, and `p50` the median of a request alone in us. "100 at once" are tasks."""
    pin(os.getpid(), CLIENT)
    rows: dict[tuple[str, str], Row] = defaultdict(lambda: defaultdict(list))
    with started() as server, Gate(f"redis://127.0.0.1:{port_of(server)}/0", namespace="bench") as gate:
        for repetition in range(-1, plan.repetitions):
            n = plan.size(4_000) if repetition >= 0 else 200
            for who, measure in _FACES.items():
                for step in STEPS:
                    figures = _measure(server, measure, gate, step, n)
                    for name, figure in figures.items() if repetition >= 0 else ():
                        rows[who, step][name].append(figure)
            print(".", end="", flush=True)
    print()
    return [{"who": who, "step": step, **row} for (who, step), row in rows.items()]


def _measure(server: Any, measure: Callable[[Gate, str, int], Any], gate: Gate, step: str, n: int) -> dict[str, float]:
    """Return the costs of a request."""
    before = spent(server)
    began, cpu = time.perf_counter(), time.process_time()
    times = measure(gate, step, n)
    seconds, used, after = time.perf_counter() - began, time.process_time() - cpu, spent(server)
    return {
        "rate": n / seconds,
        "client_us": used / n * 1e6,
        "server_us": (after.cpu - before.cpu) / n * 1e6,
        "p50": sorted(times)[n // 2] * 1e6,
    }


def _keys(step: str, n: int) -> list[str | None]:
    if step in ("without", "passed on"):
        return [None] * n
    return [f"key-{next(_numbers)}" for _ in range(n)] if step == "first" else [f"key-{step}"] * n


# ASGI


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def _request(app: Any, key: str | None) -> float:
    headers = [(b"host", b"shop"), (b"content-type", b"application/json"), (b"x-account", b"anna")]
    if key is not None:
        headers.append((b"idempotency-key", key.encode()))
    scope = {"type": "http", "method": "POST", "path": "/payments", "query_string": b"", "headers": headers}

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None: ...

    began = time.perf_counter()
    await app(scope, receive, send)
    return time.perf_counter() - began


async def _requests(gate: Gate, step: str, n: int, tasks: int) -> list[float]:
    from idemgate_http import IdempotencyKey

    app: Any = _app
    if step != "without":
        app = IdempotencyKey(_app, gate=gate, caller=lambda request: request.headers["x-account"])
    if step == "replay":
        await _request(app, "key-replay")
    waiting, times = iter(_keys(step, n)), list[float]()

    async def work() -> None:
        for key in waiting:
            times.append(await _request(app, key))

    await asyncio.gather(*[work() for _ in range(tasks)])
    await gate.aio.close()
    return times


# WSGI


def _wsgi_app(environ: Any, start_response: Any) -> Any:
    environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    start_response("201 Created", [("Content-Type", "application/json"), ("Content-Length", str(len(ANSWER)))])
    return [ANSWER]


def _call(app: Any, key: str | None) -> float:
    environ = {
        "REQUEST_METHOD": "POST", "SCRIPT_NAME": "", "PATH_INFO": "/payments", "QUERY_STRING": "",
        "CONTENT_TYPE": "application/json", "CONTENT_LENGTH": str(len(BODY)), "HTTP_HOST": "shop",
        "HTTP_X_ACCOUNT": "anna", "wsgi.input": io.BytesIO(BODY),
    }  # fmt: skip
    if key is not None:
        environ["HTTP_IDEMPOTENCY_KEY"] = key
    began = time.perf_counter()
    b"".join(app(environ, lambda *_: None))
    return time.perf_counter() - began


def _calls(gate: Gate, step: str, n: int) -> list[float]:
    from idemgate_http.wsgi import IdempotencyKeyWSGI

    app: Any = _wsgi_app
    if step != "without":
        app = IdempotencyKeyWSGI(_wsgi_app, gate=gate, caller=lambda request: request.headers["x-account"])
    if step == "replay":
        _call(app, "key-replay")
    return [_call(app, key) for key in _keys(step, n)]


_FACES: dict[str, Callable[[Gate, str, int], Any]] = {
    "WSGI": _calls,
    "ASGI": lambda gate, step, n: asyncio.run(_requests(gate, step, n, 1)),
    "ASGI, 100 at once": lambda gate, step, n: asyncio.run(_requests(gate, step, n, TASKS)),
}
