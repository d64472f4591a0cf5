"""A shop in Django on SQLite with ATOMIC_REQUESTS. Each process sends itself one request, and may be killed inside it.

python shop.py STORE reads lines of five words: NAMESPACE NOW DATABASE FORM KILL. For each it forks a process. It prints
as JSON how that ended, and what it returned: the status, the body, and whether the response is a replay.

FORM is "middleware" or "decorator". KILL is "inside" (the view), "between" (commit and completion), "after" (the
completion) or "never".
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from typing import Any

import django
from django.conf import settings
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from idemgate_http import Response
from idemgate_http.django import idempotent

from idemgate import Gate
from idemgate.testing import Clock

urlpatterns: list[Any] = []
death = {"where": "never"}


def die(where: str) -> None:
    """Kill this process if that is where it has to die."""
    if where == death["where"]:
        os.kill(os.getpid(), signal.SIGKILL)


def redact(response: Response) -> Response:
    """Run between the commit and the completion."""
    die("between")
    return response


def account_of(request: Any) -> str:
    return str(request.headers["x-account"])


def pay(request: Any) -> HttpResponse:
    with connection.cursor() as cursor:
        assert connection.in_atomic_block
        cursor.execute("INSERT INTO payments DEFAULT VALUES")
        die("inside")
        return HttpResponse(str(cursor.lastrowid), status=201)


def decorate() -> Any:
    guarded = idempotent(pay)

    @functools.wraps(guarded)
    def view(request: Any) -> Any:
        response = guarded(request)
        die("after")
        return response

    return view


def send(namespace: str, now: str, database: str, form: str) -> list[Any]:
    """Send one request to the shop and return what came back."""
    gate = Gate(sys.argv[1], namespace=namespace, clock=Clock(float(now)))
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database, "ATOMIC_REQUESTS": True}},
        IDEMGATE_HTTP={"GATE": gate, "CALLER": "__main__.account_of", "REDACT": redact},
        MIDDLEWARE=["idemgate_http.django.IdempotencyKeyMiddleware"] if form == "middleware" else [],
        ROOT_URLCONF="__main__",
    )
    django.setup()
    urlpatterns.append(path("pay", pay if form == "middleware" else decorate()))
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY)")
    response = Client().post("/pay", headers={"idempotency-key": "k", "x-account": "a"})
    die("after")
    gate.close()
    return [response.status_code, response.content.decode(), "idempotent-replayed" in response.headers]


def main() -> None:
    for line in sys.stdin:
        *words, death["where"] = line.split()
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, json.dumps(send(*words)).encode())
            os._exit(0)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with open(reading) as pipe:  # noqa: PTH123 - a descriptor
            returned = json.loads(pipe.read() or "null")
        print(json.dumps([os.waitstatus_to_exitcode(status), returned]), flush=True)


if __name__ == "__main__":
    main()
