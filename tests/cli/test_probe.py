"""The HTTP probes of `idemgate run`, and its log as JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from idemgate import Gate, InvalidArgument
from idemgate.cli import main, probe
from idemgate.cli.probe import Probes
from idemgate.metrics import GateCollector
from tests import cluster
from tests.waiting import eventually, wait_until

SHOP = """
from idemgate import Gate

gate = Gate({url!r}, namespace={namespace!r})

@gate.topic("orders").handler
def on_order(delivery):
    raise ValueError("no \\x1b[31mstock")
"""


def ask(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, Any]:
    """The status and the body of an answer."""
    request = urllib.request.Request(f"http://{host}:{port}{path}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def read(port: int, path: str) -> str:
    """The text of an answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


async def ask_beside(probes: Probes, path: str) -> tuple[int, Any]:
    return await asyncio.to_thread(ask, probes.port, path)


@pytest.fixture
def probes(gate: Gate) -> Probes:
    """The probes of a gate with one topic, on a free port."""
    gate.topic("orders").handler(lambda delivery: None)
    made = Probes(gate, "0")
    gate.context.lifespans.add(made.lifespan, first=True)
    return made


async def test_a_worker_that_runs_is_live_and_ready(gate: Gate, probes: Probes) -> None:
    async with gate.aio.worker():
        assert await ask_beside(probes, "/live") == (200, {"ok": True, "problems": []})
        assert await ask_beside(probes, "/ready?x=1") == (200, {"ok": True, "problems": []})
        assert (await ask_beside(probes, "/"))[0] == 404
    with pytest.raises(urllib.error.URLError):
        await ask_beside(probes, "/live")


async def test_metrics_are_those_of_the_process(gate: Gate, probes: Probes) -> None:
    gate.topic("orders").trigger("order-7", 1)
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"])
        text = await asyncio.to_thread(read, probes.port, "/metrics")
    assert f'idemgate_process_events_total{{event="worker.acked",namespace="{gate.context.namespace}"}} 1.0' in text
    assert "idemgate_topic_" not in text


async def test_metrics_of_a_gate_that_the_program_registered_are_there_once(gate: Gate, probes: Probes) -> None:
    collector = GateCollector(gate)
    REGISTRY.register(collector)
    try:
        async with gate.aio.worker():
            text = await asyncio.to_thread(read, probes.port, "/metrics")
    finally:
        REGISTRY.unregister(collector)
    assert text.count("# TYPE idemgate_process_events_total counter") == 1


async def test_without_the_extra_metrics_say_what_to_install(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "idemgate.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    gate.topic("orders").handler(lambda delivery: None)
    probes = Probes(gate, "0")
    gate.context.lifespans.add(probes.lifespan, first=True)
    async with gate.aio.worker():
        status, answer = await ask_beside(probes, "/metrics")
        assert (await ask_beside(probes, "/live"))[0] == 200
    assert status == 501
    assert "pip install '.[metrics]'" in answer["problems"][0]


async def test_an_answer_that_raises_is_logged(
    gate: Gate, probes: Probes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probes, "live", lambda: 1 / 0)
    async with gate.aio.worker():
        assert (await ask_beside(probes, "/live"))[0] == 500
    assert "http.failed path=/live" in caplog.text


async def test_it_is_live_before_it_is_ready(gate: Gate, probes: Probes) -> None:
    async with gate.context.lifespans.hold():
        assert (await ask_beside(probes, "/live"))[0] == 200
        assert await ask_beside(probes, "/ready") == (503, {"ok": False, "problems": ["not started"]})


async def test_a_blocked_event_loop_is_not_live(gate: Gate, probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate.aio.worker():
        probes._ran_at -= 60
        status, answer = await ask_beside(probes, "/live")
    assert status == 503
    assert answer["problems"] == ["the event loop has not run for 60 s"]


async def test_a_worker_without_replies_is_not_ready_unless_it_is_busy(
    gate: Gate, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gate.aio.worker() as worker:
        monkeypatch.setattr(probe, "STALLED", -1.0)
        probes._ran_at += 1000
        status, answer = await ask_beside(probes, "/ready")
        assert (status, answer["problems"]) == (503, ["no reply to a poll for 0 s"])
        monkeypatch.setattr(type(worker._loop.dispatcher), "free", 0)
        assert (await ask_beside(probes, "/ready"))[0] == 200
        monkeypatch.undo()


async def test_a_store_that_is_away_makes_it_not_ready(tmp_path: Path) -> None:
    (port,) = cluster.unused_ports(1)
    with cluster.server(tmp_path / "server", port) as client, Gate(f"redis://127.0.0.1:{port}/0") as gate:
        gate.topic("orders").handler(lambda delivery: None)
        probes = Probes(gate, "0")
        gate.context.lifespans.add(probes.lifespan)
        async with gate.aio.worker(grace=0):
            assert (await ask_beside(probes, "/ready"))[0] == 200
            client.shutdown(nosave=True)
            answer = await ask_beside(probes, "/ready")
            assert answer == (503, {"ok": False, "problems": ["the store does not answer"]})
            assert (await ask_beside(probes, "/live"))[0] == 200
        await gate.aio.close()


@pytest.mark.parametrize("address", ["x", "70000", "-1", "127.0.0.1", "no.such.host.invalid:0"])
def test_an_address_that_is_none_is_refused(gate: Gate, address: str) -> None:
    with pytest.raises(InvalidArgument, match="--probe"):
        Probes(gate, address)


def test_a_port_that_is_taken_is_one_line(
    tmp_path: Path, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken_shop.py").write_text(SHOP.format(url=url, namespace=namespace))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["run", "taken_shop:gate", "--probe", str(taken.getsockname()[1])]) == 2
    assert "cannot listen there" in capsys.readouterr().err


def test_only_this_machine_reaches_it_unless_a_host_is_given(gate: Gate) -> None:
    for address, host in (("0", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0"), ("[::1]:0", "::1")):
        server = Probes(gate, address)._server
        assert server.server_address[0] == host
        server.server_close()


def test_the_command_answers_probes_and_logs_json(start: Any, tmp_path: Path, url: str, namespace: str) -> None:
    (tmp_path / "app.py").write_text(SHOP.format(url=url, namespace=namespace))
    (port,) = cluster.unused_ports(1)
    with Gate(url, namespace=namespace, presence=False) as theirs:
        theirs.topic("orders").trigger("order-7")
        command = start("run", "app:gate", "--probe", str(port), "--log", "json")
        wait_until(lambda: theirs.topic("orders").stats()["nacked"])
    assert ask(port, "/ready")[0] == 200
    command.process.terminate()
    code, _, err = command.end()
    assert code == 0, err
    events = [json.loads(line) for line in err.splitlines()]
    assert {(event["host"], event["pid"]) for event in events} == {(socket.gethostname(), command.process.pid)}
    failed = next(event for event in events if event["message"].startswith("worker.handler_failed"))
    assert (failed["level"], failed["facts"]["key"]) == ("WARNING", "order-7")
    assert "stock" in failed["traceback"]
    assert "\x1b" not in err
