"""`idemgate run` and `idemgate server`, and how the command line says no."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import RedisMembership
from idemgate.cli import main

SHOP = """
import threading
import time
from idemgate import Gate, RedisMembership

gate = Gate({url!r}, namespace={namespace!r})
orders = gate.topic("orders")
stuck = gate.topic("stuck")
crew = RedisMembership(gate, "crew")
number = 3


@orders.handler
def on_order(delivery):
    print("began", delivery.key, flush=True)
    time.sleep(float(delivery.payload))
    print("ended", delivery.key, flush=True)


@stuck.handler
def on_stuck(delivery):
    print("began", delivery.key, flush=True)
    threading.Event().wait()


@gate.subscribe({namespace!r})
def heard(heard):
    orders.trigger(heard.data.decode(), 0)
"""


@pytest.fixture
def shop(tmp_path: Path, url: str, namespace: str) -> str:
    """A program in the current directory of `start`."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "shop/app.py").write_text(SHOP.format(url=url, namespace=namespace))
    return "shop.app:gate"


@pytest.fixture
def here(shop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the program's directory, with nothing of it imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("shop", "shop.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def theirs(url: str, namespace: str) -> Any:
    """The same topics, from outside."""
    from idemgate import Gate

    with Gate(url, namespace=namespace) as gate:
        yield gate


def test_a_worker_handles_and_ends_gracefully(start: Any, shop: str, theirs: Any) -> None:
    # Given a worker that is busy with an order
    theirs.topic("orders").trigger("first", 0.5)
    worker = start("run", shop, "--topic", "orders")
    worker.read_until("began first")
    # When it is asked to end
    worker.process.send_signal(signal.SIGTERM)
    # Then the order is finished and acknowledged, and what happened is in the log with its facts
    code, out, err = worker.end(60)
    assert (code, out) == (0, "ended first\n")
    assert theirs.topic("orders").stats()["acked"] == 1
    assert re.search(r"INFO +idemgate\.worker worker\.started topics=\['orders'\] concurrency=32\n", err)
    assert "worker.stopped" in err


def test_subscribers_run_beside_the_worker(start: Any, shop: str, raw: Any, namespace: str) -> None:
    # Given a worker whose gate listens to a channel
    worker = start("run", shop)
    deadline = time.monotonic() + 60
    while not raw.publish(namespace, "second") and time.monotonic() < deadline:
        time.sleep(0.05)
    # Then what is published there is handled
    worker.read_until("ended second")
    # and Ctrl-C is a graceful end too
    worker.signal_group(signal.SIGINT)
    code, _, err = worker.end(60)
    assert (code, "Traceback" in err) == (0, False)


@pytest.mark.slow
def test_a_thread_that_does_not_end_does_not_keep_the_process(start: Any, shop: str, theirs: Any) -> None:
    # Given a handler that never returns
    theirs.topic("stuck").trigger("third")
    worker = start("run", shop, "--grace", "200ms")
    worker.read_until("began third")
    # When the worker is asked to end
    worker.process.send_signal(signal.SIGTERM)
    # Then it does, and says what it cut short
    code, _, err = worker.end(60)
    assert code == 1
    assert "worker.cut_short topic='stuck'" in err
    # and the message is left to its lease, not lost
    assert theirs.topic("stuck").stats().in_flight == 1


@pytest.mark.parametrize(
    ("where", "group"), [("redis", "workers"), pytest.param("shop.app:crew", "crew", marks=pytest.mark.slow)]
)
def test_workers_may_divide_the_slots(start: Any, shop: str, theirs: Any, where: str, group: str) -> None:
    # Given a worker that is a member, of the usual group or the program's own
    worker = start("run", shop, "--topic", "orders", "--membership", where)
    theirs.topic("orders").trigger("fourth", 0)
    worker.read_until("ended fourth")
    # When it is asked to end
    holders = asyncio.run(list_members(theirs, group)).holders
    worker.process.send_signal(signal.SIGTERM)
    # Then it had the topic's slot, and has left
    code, _, err = worker.end(60)
    assert (code, list(holders)) == (0, [("orders", 0)])
    assert asyncio.run(list_members(theirs, group)).members == {}
    assert re.search(r"members\.joined .*members=1", err)


async def list_members(gate: Any, group: str) -> Any:
    try:
        return await RedisMembership(gate, group).list_members()
    finally:
        await gate.aio.close()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("shop.app:nope", "module 'shop.app' has no 'nope'. Memberships in it: shop.app:crew"),
        ("shop.app:number", "'number' is of type int, not Membership. Memberships in it: shop.app:crew"),
        ("zookeeper", "--membership='zookeeper': not a module and a name in it"),
    ],
)
def test_a_membership_that_is_not_there(
    here: None, shop: str, where: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", shop, "--membership", where]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (":gate", "not a module and a name in it"),
        ("shap:gate", "there is no module 'shap'. Looked in"),
        ("shop.nope.app:gate", "there is no module 'shop.nope'. Looked in"),
        ("shop.app:gat", "module 'shop.app' has no 'gat'. Gates in it: shop.app:gate"),
        ("shop.app:number", "'number' is of type int, not Gate. Gates in it: shop.app:gate"),
        ("json:loads", "'loads' is of type function, not Gate. Module 'json' has no gate: make one with Gate(...)"),
        (".app:gate", "not a module and a name in it"),
    ],
)
def test_a_gate_that_is_not_there(here: None, target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Given a current directory with a program
    # Then a wrong target is one line that says what is wrong
    assert main(["run", target]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("idemgate: ")
    assert err.count("\n") == 1


def test_an_import_that_is_missing_inside_is_not_hidden(here: None, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "halfapp.py").write_text("import not_there_at_all\n")
    assert main(["run", "halfapp:gate"]) == 2
    assert "ModuleNotFoundError: No module named 'not_there_at_all'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "shop.app:gate", "--topic", "nope"], "no handler is registered for it"),
        (["demo", "--input", "/nowhere"], "cannot be read"),
        (["demo", "--url", "redis+cluster://a:1"], "one server's clock"),
    ],
)
def test_bad_input_is_one_line(
    here: None, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_store_that_is_away_is_one_line(start: Any, tmp_path: Path) -> None:
    app = SHOP.format(url="redis://127.0.0.1:1", namespace="x").replace("namespace=", "timeout=0.2, namespace=")
    (tmp_path / "app.py").write_text(app)
    code, _, err = start("run", "app:gate", "--topic", "orders").end(60)
    assert (code, "Traceback" in err) == (1, False)
    assert re.fullmatch(r"idemgate: no answer from the store .*Connection.*", err.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["run", "a:b", "--concurrency", "0"],
        ["run", "a:b", "--grace", "soon"],
        ["demo", "--speed", "0"],
        ["demo", "--speed", "nan"],
        ["demo", "--window", "-1s"],
        ["demo", "--events", "1.5"],
        ["demo", "--subscribers", "0"],
    ],
)
def test_a_wrong_command_line_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: idemgate" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"idemgate {version('idemgate-redis')}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_server_in_the_foreground(start: Any, tmp_path: Path, number: signal.Signals) -> None:
    # Given a server that keeps its data
    server = start("server", "data")
    assert server.process.stdout is not None
    address = server.process.stdout.readline().strip()
    # Then the first line is all a program needs to use it
    with redis.Redis.from_url(address) as client:
        assert client.ping()
    # When it gets a signal
    server.process.send_signal(number)
    # Then it ends with it, and keeps the data
    code, _, err = server.end(60)
    assert (code, "Traceback" in err) == (0, False)
    assert not Path(address.removeprefix("unix://")).exists()
    assert (tmp_path / "data").is_dir()


# -- which gate -------------------------------------------------------------------------------------------------------

LISTENERS = """
import idemgate

@idemgate.merge(key="{item}", name="reindex")
def reindex(item):
    print("reindexed", item, flush=True)
"""


@pytest.fixture
def scanned(tmp_path: Path, url: str, namespace: str) -> None:
    """A package whose listeners are in several modules, on the default gate."""
    for folder in ("shopapp", "shopapp/listeners"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "shopapp/settings.py").write_text(
        f"import idemgate\nidemgate.configure({url!r}, namespace={namespace!r})\n"
    )
    (tmp_path / "shopapp/listeners/search.py").write_text(LISTENERS)
    (tmp_path / "shopapp/__main__.py").write_text("raise SystemExit('this is the program')\n")


@pytest.mark.parametrize(
    "words", [pytest.param(["--scan", "shopapp"], marks=pytest.mark.slow), ["shopapp.settings", "--scan", "shopapp"]]
)
def test_listeners_of_a_package_are_found_for_the_default_gate(
    start: Any, scanned: None, theirs: Any, words: list[str]
) -> None:
    theirs.topic("reindex").trigger("a", {"item": "a"})
    worker = start("run", *words)
    worker.read_until("reindexed a")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end()[0] == 0


@pytest.mark.slow
def test_a_scan_names_the_folders_that_it_skips(scanned: None, tmp_path: Path) -> None:
    # Given folders with a module and without __init__.py, one inside a sub-package, and folders without modules
    for folder in ("scripts", "listeners/deep", "static", "templates.d"):
        (tmp_path / "shopapp" / folder).mkdir()
    for module in ("scripts/once.py", "listeners/deep/orders.py", "templates.d/page.py"):
        (tmp_path / "shopapp" / module).write_text("raise SystemExit('a scan imported it')\n")
    # When the package is scanned
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    program += "from idemgate.cli.run import find_gate; find_gate(None, ['shopapp'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    # Then the modules are not imported, and a warning names their folders
    folders = [line.partition("folder=")[2].partition(":")[0] for line in done.stderr.splitlines()]
    assert folders == [repr(str(tmp_path / "shopapp/listeners/deep")), repr(str(tmp_path / "shopapp/scripts"))]


@pytest.mark.slow
def test_a_module_with_one_gate_needs_no_name(start: Any, shop: str, theirs: Any) -> None:
    theirs.topic("orders").trigger("first", 0)
    worker = start("run", "shop.app")
    worker.read_until("ended first")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end()[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "MODULE:GATE"),
        (["--scan", "absent"], "no module 'absent'"),
        (["shop"], "it has no gate"),
        (["shop"], "--scan shop"),
        (["--scan", "shop.empty"], "Make a Gate"),
        (["a b"], "not a module"),
    ],
)
def test_a_command_line_without_one_gate_is_refused(
    here: None, tmp_path: Path, capsys: Any, words: list[str], says: str
) -> None:
    (tmp_path / "shop/empty.py").touch()
    assert main(["run", *words]) == 2
    assert says in capsys.readouterr().err


def test_several_gates_must_be_named(here: None, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "shop/app.py").write_text("from idemgate import Gate\none, two = Gate(), Gate()\n")
    assert main(["run", "shop.app"]) == 2
    assert "shop.app:one, shop.app:two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "last"),
    [
        pytest.param("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", id="import"),
        pytest.param("def f(:\n", "SyntaxError: invalid syntax", id="syntax"),
        pytest.param("def f():\n    return 1 / 0\nf()\n", "ZeroDivisionError: division by zero", id="error"),
    ],
)
@pytest.mark.parametrize("words", [["{}:gate"], ["{}"], ["--scan", "{}"]], ids=" ".join)
def test_a_program_that_cannot_be_imported_is_shown_without_frames_of_ours(
    source: str, last: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # Given a module that raises while it is imported
    name = f"broken_{abs(hash((source, *words)))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Then the command shows the lines of that module only
    assert main(["run", *(word.format(name) for word in words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "idemgate: the program cannot be imported"
    assert lines[-1] == last
    assert all(f"{name}.py" in line for line in lines if line.lstrip().startswith("File "))
    assert len(lines) <= 9
