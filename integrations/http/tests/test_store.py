"""What a request gets while the store is away, and when its claim was lost, held, or tried too often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from idemgate_http import record_key

from idemgate import Gate
from integrations.http.tests.apps import Answer
from integrations.http.tests.conftest import Client, Effects

pytestmark = pytest.mark.one_in(3)

Serve = Callable[..., Client]


@pytest.fixture
def away() -> Iterator[Gate]:
    """A gate whose store does not answer."""
    with Gate("redis://127.0.0.1:1", namespace="away", timeout=0.05) as gate:
        yield gate


@pytest.fixture
def effects() -> Effects:
    return Effects(lambda call, number: Answer(b"%d" % number))


def name_of(response: Any) -> str:
    return str(response.json()["type"]).rpartition(":")[2]


def test_while_the_store_is_away_a_request_is_refused(serve: Serve, effects: Effects, away: Gate) -> None:
    client = serve(effects, gate=away, retry_after="2s")
    response = client.post()
    assert (response.status_code, name_of(response)) == (503, "store-unavailable")
    assert response.headers["retry-after"] == "2"
    assert client.post(None).status_code == 201  # unguarded requests need no store
    assert len(effects.calls) == 1
    assert away.counters["http.store_unavailable"] == 1


@pytest.mark.parametrize(("policy", "runs"), [("run", 2), ("local", 1)])
def test_while_the_store_is_away_a_request_may_run(
    serve: Serve, effects: Effects, away: Gate, policy: str, runs: int
) -> None:
    client = serve(effects, gate=away, on_store_error=policy)
    assert [client.post().status_code for _ in range(2)] == [201, 201]
    assert len(effects.calls) == runs
    assert away.counters["http.unguarded"] == runs
    assert away.counters[f"once.store_error.{policy}"] == 2


def hold(serve: Serve, **options: Any) -> tuple[Client, list[Any], Callable[[], None]]:
    """Start a request whose first run waits. Return the client, the answers, and a function that lets it go on."""
    entered, leave = threading.Event(), threading.Event()
    answers: list[Any] = []

    def block(call: Any, number: int) -> Answer:
        if number == 1:
            entered.set()
            assert leave.wait(20)
        return Answer(b"%d" % number)

    client = serve(Effects(block), **options)
    thread = threading.Thread(target=lambda: answers.append(client.post()))
    thread.start()
    assert entered.wait(20)

    def finish() -> None:
        leave.set()
        thread.join(20)

    return client, answers, finish


def test_a_request_that_lost_its_lease_gets_its_own_answer_and_is_counted(serve: Serve, clock: Any) -> None:
    """A server that stalls for longer than its lease. Both runs have happened; the record has the second answer."""
    client, answers, finish = hold(serve, max_run="1s")
    clock.advance("10m")
    while (second := client.post()).status_code == 409:
        clock.advance("1m")
    finish()
    assert (second.content, answers[0].content) == (b"2", b"1")
    assert client.post().content == b"2"
    assert client.gate.counters["http.lost"] == 1


def test_a_key_whose_server_vanished_may_be_held_for_a_decision(serve: Serve, clock: Any) -> None:
    client, _, finish = hold(serve, max_run="1s", on_lease_loss="hold")
    clock.advance("10m")
    while name_of(response := client.post()) == "in-progress":
        clock.advance("1m")
    assert (response.status_code, name_of(response)) == (409, "outcome-unknown")
    assert "retry-after" not in response.headers
    finish()


def test_a_key_may_have_a_number_of_attempts(serve: Serve) -> None:
    client = serve(Effects(lambda call, number: Answer(b"", 500)), max_attempts=2)
    assert [client.post().status_code for _ in range(2)] == [500, 500]
    response = client.post()
    assert (response.status_code, name_of(response)) == (409, "attempts-exhausted")


def test_a_record_of_another_program_is_not_replayed(serve: Serve, effects: Effects) -> None:
    client = serve(effects, fingerprint=lambda request, body: "same")
    key = record_key("a", "POST", httpx.URL(client.url).path + "/pay", "k")
    client.gate.guard("http").run(key, lambda: {"not": "ours"}, fingerprint="same")
    response = client.post()
    assert (response.status_code, name_of(response)) == (409, "response-not-kept")
    assert not effects.calls
