"""The sample of the mutants is as large as was said, and of each file its share; what is explained can be made,
and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from idemgate import lua
from idemgate.lua.checked import checked_script, with_check
from idemgate.store.resp import pack_command
from tools.mutation import __main__ as mutation
from tools.mutation import edits, judging, operators, tracing

FILES = {f"core/{n}": n for n in range(1, 60)} | {"topics/take": 60}
FOUND = [
    operators.Mutant(file, number, "", f"after {number}", f"before {number}")
    for file, many in FILES.items()
    for number in range(many)
]


@pytest.mark.parametrize("n", [1, 5, 40, 400])
def test_a_sample_is_as_large_as_was_said(n: int) -> None:
    chosen = operators.sampled(FOUND, n, 1)
    assert len({*chosen}) == len(chosen) == n
    assert {*chosen} <= {*FOUND}
    assert chosen == operators.sampled(FOUND, n, 1)
    assert {one.file for one in chosen} != {one.file for one in operators.sampled(FOUND, n, 2)} or n > 50


def test_a_sample_of_more_than_there_are_is_all() -> None:
    assert {*operators.sampled(FOUND, 10_000, 1)} == {*FOUND}


def test_each_file_has_its_share_and_the_hot_path_three_times_that() -> None:
    chosen = [one.file for one in operators.sampled(FOUND, 390, 1)]
    assert chosen.count("core/59") in (12, 13)  # of 390 each, of 1,770 + 180
    assert (hot := chosen.count("topics/take")) in (36, 37)
    assert chosen[:hot] == ["topics/take"] * hot


def test_what_is_changed_in_core_can_be_sampled() -> None:
    found = edits.edits("core/counters")
    assert len(operators.sampled(found, 3, 1)) == 3


def test_each_change_that_is_explained_can_be_made() -> None:
    possible = Counter((one.file, one.name) for one in mutation._all())
    assert {found: possible[found] for found in mutation.explained() if possible[found] != 1} == {}
    assert {*possible.values()} == {1}


def test_each_reason_is_read() -> None:
    lines = mutation.SURVIVORS.read_text().splitlines()
    assert all(mutation.explained().values())
    assert len(mutation.explained()) == sum(line.startswith("- ") for line in lines)


def test_a_change_has_a_number_only_among_several() -> None:
    found = [("f", "<", 1), ("f", "+", 2), ("g", "<", 3), ("f", "<", 4)]
    assert [*operators.named(found)] == [("`f` `<` 1", 1), ("`f` `+`", 2), ("`g` `<`", 3), ("`f` `<` 2", 4)]


def test_a_change_is_named_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
local a = 0
local function f(x)
  local function g()
    x = x + y
  end
  return x and g()
end
f(true)
"""
    monkeypatch.setattr(lua, "source", lambda file: text)
    assert [(one.line, one.name) for one in operators.mutants("a/script")] == [
        (2, "`-` `0`"),
        (5, "`f.g` `+`"),
        (5, "`f.g` `assign x`"),
        (7, "`f` `and`"),
        (9, "`-` `true`"),
        (9, "`-` `call f`"),
    ]


def test_the_place_of_a_line_is_no_other_branch() -> None:
    for file in operators.files():
        source = lua.source(file)
        lines, statements = source.splitlines(), {number for number, _ in tracing._statements(source)}
        for number, line in enumerate(lines, 1):
            code = line.partition("--")[0].strip()
            assert code != "else" or number + 1 in statements or lines[number].lstrip().startswith("--"), (file, number)


def test_a_changed_script_still_checks_the_rights_of_its_user() -> None:
    # Given a script whose text is another one in a fork
    def work() -> list[bool]:
        judging._replace({"guard/release": f"{lua.source('guard/release')}-- changed\n"})
        changed = lua.script("guard/release")
        checked = with_check(pack_command((b"EVALSHA", changed.sha, 1, b"key")))
        return [changed.text.endswith(b"-- changed\n"), checked_script("guard/release").sha in checked]

    # When a user with a name sends it, then the variant that checks rights is sent, which is made of the changed text
    assert checked_script("guard/release").sha != lua.script("guard/release").sha
    assert dict(judging._answers([("fork", work, 60.0)], 1)) == {"fork": [True, True]}


@pytest.mark.slow
def test_a_fork_that_ended_leaves_no_socket(tmp_path: Path) -> None:
    # Given forks with a server each, of which one does not end on its own
    def work(seconds: float) -> bool:
        judging._server()
        (tmp_path / str(os.getpid())).touch()
        time.sleep(seconds)
        return True

    answers = dict(judging._answers([("ends", partial(work, 0), 60.0), ("is late", partial(work, 60), 2.0)], 1))
    assert answers == {"ends": True, "is late": None}
    assert [one.name for one in tmp_path.iterdir() if Path(judging._socket(int(one.name))).exists()] == []


@pytest.mark.slow
def test_a_run_that_is_ended_ends_its_forks_and_their_servers(tmp_path: Path) -> None:
    # Given a run that waits for a fork with a server
    run = subprocess.Popen([sys.executable, "-c", WAITING, str(tmp_path)], cwd=judging.ROOT)
    while not (begun := [one.name for one in tmp_path.iterdir()]):
        assert run.poll() is None
        time.sleep(0.01)
    (fork,) = map(int, begun)
    os.killpg(fork, 0)
    # When it gets SIGTERM
    run.terminate()
    # Then it ends, and nobody of the fork's process group is left
    assert run.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        while True:  # init may not have buried them yet
            os.killpg(fork, 0)
            time.sleep(0.01)
    assert not Path(judging._socket(fork)).exists()


WAITING = """
import os, pathlib, sys, time
from tools.mutation import judging

def work():
    judging._server()
    (pathlib.Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(600)

list(judging._answers([("waits", work, 600.0)], 1))
"""
