"""A forked child shares neither ids nor locks with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from idemgate.core.calls import _Prefix, new_id
from idemgate.core.forks import lock_reset_at_fork


class Holder:
    def __init__(self) -> None:
        self.lock = lock_reset_at_fork(self, "lock")


def in_child(work: Callable[[], bytes]) -> bytes:
    """What it gives in a fork."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_a_child_draws_ids_of_its_own() -> None:
    mine, its = new_id(), in_child(new_id)
    assert len(mine) == len(its) == 16
    assert mine[:10] != its[:10]
    assert new_id()[:10] == mine[:10]


def test_ten_bytes_of_an_id_are_random_and_six_count() -> None:
    assert len(_Prefix().text) == 10
    assert new_id()[10:] < new_id()[10:]


def test_a_lock_that_was_held_is_free_in_a_child() -> None:
    holder = Holder()
    with holder.lock:
        assert in_child(lambda: b"%d" % holder.lock.acquire(timeout=1)) == b"1"
        assert holder.lock.locked()


def test_it_is_so_from_the_first_import() -> None:
    code = (
        "import os; from idemgate.core import calls, forks; h = type('H', (), {})();"
        "h.lock = forks.lock_reset_at_fork(h, 'lock');"
        "h.lock.acquire(); mine = calls.new_id()[:10]; pid = os.fork();"
        "pid or os._exit(2 * (calls.new_id()[:10] == mine) + (not h.lock.acquire(timeout=1)));"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"0\n"
