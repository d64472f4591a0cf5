"""The client of `tools.http_retries`: it creates resources, gives up at random, and retries until it has an answer."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["KINDS", "Client", "Request"]

KINDS = ("flow_runs", "artifacts", "automations")
RETRYABLE = {409, 500, 502, 503}
GIVE_UP = 120
"""Seconds after which a request without an answer is a failure of the run."""


@dataclass
class Request:
    """One resource to create. Two accounts use the same Idempotency-Key, each for its own resource."""

    number: int
    kind: str
    account: str
    marker: str
    key: str
    attempts: int = 0
    lost: int = 0
    """Attempts whose answer did not arrive."""
    kills: int = 0
    """How often the server was killed between the first attempt and the answer."""
    replays: int = 0
    faults: list[str] = field(default_factory=list)


class Client:
    """Sends requests from several threads. `done` is how many have their answer."""

    def __init__(self, url: str, flow: str, seed: int, count_kills: Callable[[], int]) -> None:
        self.url, self.flow, self.seed = url, flow, seed
        self.count_kills = count_kills
        self.done = 0
        self.statuses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, requests: list[Request], threads: int) -> None:
        """Send all requests and return when each has its answer."""
        waiting = iter(requests)

        def work(number: int) -> None:
            drawn = random.Random(f"{self.seed} {number}")
            with httpx.Client(headers={"accept-encoding": "identity"}) as http:
                while True:
                    with self._lock:
                        request = next(waiting, None)
                    if request is None:
                        return
                    self._create(http, request, drawn)
                    with self._lock:
                        self.done += 1

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def _create(self, http: httpx.Client, request: Request, drawn: random.Random) -> None:
        """Send one request until it is answered, and then some copies of it."""
        kills = self.count_kills()
        first = self._retry(http, request, drawn)
        request.kills = self.count_kills() - kills
        self._check(request, first)
        for _ in range(drawn.choice((0, 0, 1, 2))):
            again = self._retry(http, request, drawn)
            self._check(request, again)
            request.replays += 1
            if again.headers.get("idempotent-replayed") != "true":
                request.faults.append("a copy of an answered request ran")
            if (again.status_code, again.content) != (first.status_code, first.content):
                request.faults.append("a copy got another answer")

    def _retry(self, http: httpx.Client, request: Request, drawn: random.Random) -> httpx.Response:
        """Return the answer. Give up some attempts after a few milliseconds, as a client with a timeout does."""
        until = time.monotonic() + GIVE_UP
        while time.monotonic() < until:
            patience = drawn.uniform(0.002, 0.06) if drawn.random() < 0.3 else 30
            request.attempts += 1
            try:
                response = self._send(http, request, patience)
            except httpx.TransportError:
                request.lost += 1
            else:
                self.statuses[_name_status(response)] += 1
                if response.status_code not in RETRYABLE:
                    return response
            time.sleep(drawn.uniform(0, 0.1))
        raise TimeoutError(f"{request} was not answered within {GIVE_UP} s")

    def _send(self, http: httpx.Client, request: Request, timeout: float) -> httpx.Response:
        headers = {"x-account": request.account, "idempotency-key": f'"{request.key}"'}
        body = build_body(request, self.flow)
        return http.post(f"{self.url}/api/{request.kind}/", json=body, headers=headers, timeout=timeout)

    def _check(self, request: Request, response: httpx.Response) -> None:
        """Note what is wrong with an answer: it must be the caller's own."""
        if response.status_code != 201:
            request.faults.append(f"status {response.status_code}: {response.text[:200]}")
        elif request.marker not in response.text:
            request.faults.append("the answer is about another resource")
        if response.headers.get("x-caller") != request.account:
            request.faults.append("a header of another caller")
        if "idempotent-replayed" in response.headers and {"set-cookie", "x-hidden"} & {*response.headers}:
            request.faults.append("a header that is not to be replayed")


def _name_status(response: httpx.Response) -> str:
    """Return the status, with the problem if it is one of the middleware."""
    kind = response.headers.get("content-type", "")
    problem = response.json()["type"].rpartition(":")[2] if kind == "application/problem+json" else ""
    return f"{response.status_code} {problem}".strip()


def build_body(request: Request, flow: str) -> dict[str, Any]:
    """Return the body that creates a resource with the marker."""
    if request.kind == "flow_runs":
        return {"flow_id": flow, "name": request.marker, "state": {"type": "PENDING"}}
    if request.kind == "artifacts":
        return {"type": "markdown", "data": request.marker}
    trigger = {"type": "event", "posture": "Reactive", "expect": ["never"], "threshold": 1, "within": 0}
    return {"name": request.marker, "trigger": trigger, "actions": [{"type": "do-nothing"}], "enabled": False}
