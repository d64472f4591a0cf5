"""What roles are for works under their access lists: a slice of `python -m tools.roles`."""

from __future__ import annotations

import pytest

from idemgate import Gate
from idemgate.errors import ServerRejected
from tools.roles import PROGRAMS, ROOT, left_out, run


@pytest.mark.parametrize("roles", [roles for roles, program in PROGRAMS.items() if program.slice])
@pytest.mark.slow
def test_a_slice_of_the_suite_passes_as_a_user_of_these_roles(roles: str) -> None:
    code, said = run(roles, 0, sliced=True)
    assert code == 0, said
    assert "passed" in said


def test_a_gate_of_a_test_does_log_in_as_that_user(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, namespace: str
) -> None:
    # Given roles in the surroundings
    monkeypatch.setenv("IDEMGATE_TEST_ROLES", "producer")
    # Then what the gates of tests log in by is a producer, and nobody else
    with Gate(request.getfixturevalue("entry"), namespace=namespace) as gate:
        assert gate.topic("t").trigger("k", 1).accepted
        with pytest.raises(ServerRejected):
            gate.first("k", "1h")


def test_what_is_run_and_left_out_is_there() -> None:
    folders = [one for program in PROGRAMS.values() for one in (*program.folders, *program.slice)]
    for name in (*folders, *left_out()):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), name
