"""`python -m tools.roles`: the tests of what each role is for, with gates that log in as users of that role.

Most programs have several roles: who consumes is a worker, and a producer and a guard, too. Of each combination the
folders are run whose subject it is, under the access list that `idemgate acl` prints. A line each says how many tests
passed, and what was left out and why; of that, what an admin may do is run as an admin. Last, every word is taken in
turn from the list of each role (`tests/security/test_least.py`).

Under the list is what a test asks of its gate. Its comparisons and damages run as a user who may do all.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["PROGRAMS", "Program", "left_out", "run"]

ROOT = Path(__file__).parents[1]


class Program(NamedTuple):
    """`slice`: files of it that take seconds. `without`: by the reason, tests or files of them."""

    folders: Sequence[str]
    slice: Sequence[str]
    without: Mapping[str, Sequence[str]] = {}


_RESHARDS = "changes the slots of a topic, which is an admin's"
_FORGETS = "forgets a topic, which is an admin's"
_AUDITS = "audits, which needs SCAN"
_DELIVERIES = [
    "tests/guard/test_handlers.py::test_a_decorator_above_a_guarded_handler_runs",
    "tests/guard/test_handlers.py::test_a_delivery_of_work_that_has_not_ended_is_rejected",
    "tests/guard/test_lost.py::test_an_extension_that_learns_a_cancellation_or_a_loss_marks_the_delivery",
]
_SUBSCRIBERS = [f"tests/worker/test_subscribers_{name}.py" for name in ("channel", "list", "stream")]
PROGRAMS = {
    "guard": Program(
        ["tests/guard", "tests/dedup"],
        ["tests/guard/test_failures.py"],
        {"guards a delivery, and is run as a worker": _DELIVERIES},
    ),
    "producer,worker,viewer": Program(
        ["tests/topics"],
        ["tests/topics/test_priorities.py"],
        {
            _RESHARDS: [
                "tests/topics/test_reshard.py",
                "tests/topics/test_stale_layouts.py",
                "tests/topics/test_history.py::test_a_history_stays_where_it_is_when_the_number_of_slots_changes",
                "tests/topics/test_events.py::test_what_another_slot_remembered_expires_too",
                "tests/topics/test_groups.py::test_messages_that_were_ordered_keep_their_order",
                "tests/topics/test_results.py::test_a_result_survives_a_change_of_the_slots_that_comes_before_the_delivery",
                "tests/topics/test_results.py::test_a_waiter_is_woken_across_a_change_of_the_slots",
                "tests/topics/test_refused.py::test_refused_payloads_are_counted_by_their_reason",
                "tests/topics/test_results.py::test_a_result_is_never_that_of_another_delivery",
                "tests/topics/test_triggers.py::test_a_version_is_seen_and_reset",
                "tests/topics/test_triggers.py::test_what_is_not_accepted_is_counted_by_its_reason",
                "tests/topics/test_events.py::test_an_event_of_two_slots_that_become_one_is_known_as_long_as_in_either",
                "tests/topics/test_events.py::test_thousands_move_with_their_slot_and_to_that_of_their_group",
                "tests/topics/test_large.py::test_large_messages_are_moved_to_other_slots",
                "tests/topics/test_large.py::test_what_is_left_is_done_where_its_slot_has_moved",
                "tests/topics/test_replays.py::test_replies_are_shown_with_the_requests_they_were_given_to",
            ],
            _FORGETS: [
                "tests/topics/test_registry.py::test_a_change_that_was_begun_ends_before_another",
                "tests/topics/test_registry.py::test_a_gate_forgets_a_topic_that_it_deleted_unless_a_worker_needs_it",
                "tests/topics/test_registry.py::test_an_emptied_topic_is_forgotten",
                "tests/topics/test_registry.py::test_killed_anywhere_it_goes_on",
                "tests/topics/test_registry.py::test_one_that_holds_something_is_kept",
                "tests/topics/test_registry.py::test_what_comes_while_it_is_being_forgotten_is_kept",
                (
                    "tests/topics/test_registry.py::"
                    "test_what_was_made_only_just_now_is_forgotten_and_what_never_was_has_no_slots"
                ),
                "tests/topics/test_registry.py::test_who_still_uses_it_makes_it_anew",
            ],
            _AUDITS: [
                (
                    "tests/topics/test_events.py::"
                    "test_thousands_with_times_of_their_own_are_each_known_as_long_as_they_should_be"
                ),
                "tests/topics/test_deliveries.py::test_a_delivery_that_is_not_plain_has_an_entry",
                "tests/topics/test_deliveries.py::test_a_slot_stores_entries_for_other_leases_than_that_of_its_deliveries",
            ],
            "counts the commands of the server (INFO)": ["tests/topics/test_commands.py"],
        },
    ),
    "guard,producer,worker,viewer": Program(
        ["tests/worker", *_DELIVERIES],
        ["tests/worker/test_worker_limits.py"],
        {
            _RESHARDS: ["tests/worker/test_worker_reshard.py::test_members_share_the_new_slots"],
            _FORGETS: ["tests/worker/test_worker_declared.py::test_a_declaration_does_not_reach_a_running_worker"],
            "makes a consumer group, which is a subscriber's": [
                "tests/worker/test_worker_downstream.py::test_entries_of_a_stream_lose_no_attempt",
            ],
            "subscribes, and is run below": _SUBSCRIBERS,
            "asks a server of its own, as a user who may do all": ["tests/worker/test_subscribers_expiry.py"],
        },
    ),
    "guard,producer,subscriber": Program(_SUBSCRIBERS, []),
    "guard,producer,worker,auditor": Program(
        ["tests/audit/test_audit.py"],
        [],
        {
            _RESHARDS: [
                "tests/audit/test_audit.py::test_a_change_of_slots_that_was_cut_off_is_said_with_what_goes_on_with_it",
                "tests/audit/test_audit.py::test_a_change_of_the_number_of_slots_meanwhile_is_no_fault",
                "tests/audit/test_audit.py::test_slots_that_are_changed_to_and_fro_are_no_fault",
                "tests/audit/test_audit.py::test_what_was_asked_for_is_no_fault",
            ],
            "records what an operator did, which is an admin's": [
                f"tests/audit/test_audit.py::{test}"
                for test in (
                    "test_a_planted_fault_is_found_alone_and_the_printed_commands_mend_it[an act that cannot be read]",
                    "test_a_planted_fault_is_found_alone_and_the_printed_commands_mend_it[the acts end]",
                    "test_of_two_faults_the_commands_mend_both[21]",
                )
            ],
            "asks in a second namespace": [
                "tests/audit/test_audit.py::test_a_store_is_named_by_its_url_and_namespaces_do_not_mix",
            ],
        },
    ),
}
"""By the roles of a program. Who only looks (viewer, auditor) makes nothing to look at: what these are for is in the
scenes of `test_least.py`."""


def left_out(*reasons: str) -> list[str]:
    """For these reasons; for any, if none is given."""
    found = [(why, tests) for program in PROGRAMS.values() for why, tests in program.without.items()]
    return [test for why, tests in found if not reasons or why in reasons for test in tests]


PROGRAMS["admin"] = Program(
    left_out(_RESHARDS, _FORGETS, _AUDITS),
    [],
    {
        "takes words from the list of the same user": [
            "tests/topics/test_reshard.py::test_a_user_who_may_not_ask_all_of_it_moves_nothing"
        ],
    },
)


def run(roles: str, jobs: int, *, sliced: bool = False) -> tuple[int, str]:
    """The exit code of pytest, and what a reader wants to know of it."""
    program = PROGRAMS[roles]
    without = [word for tests in program.without.values() for test in tests for word in ("--deselect", test)]
    return _tested([*without, *(program.slice if sliced else program.folders)], jobs, {"IDEMGATE_TEST_ROLES": roles})


def _tested(words: Sequence[str], jobs: int, more: Mapping[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(jobs), "--tb=short", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    said = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last))
    return done.returncode, said if done.returncode == 0 else f"{said}\n{done.stdout}{done.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tools.roles", description=__doc__)
    names = [*PROGRAMS, "least"]
    parser.add_argument("roles", nargs="*", help=f"some of {'  '.join(names)} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="test processes (default: %(default)s)")
    options = parser.parse_args()
    if unknown := {*options.roles} - {*names}:
        parser.error(f"{'  '.join(sorted(unknown))}: not of {'  '.join(names)}")
    return max([_reported(name, options.jobs) for name in options.roles or names])


def _reported(name: str, jobs: int) -> int:
    if name == "least":
        code, said = _tested(["tests/security/test_least.py"], jobs, {"IDEMGATE_LEAST": "1"})
        print(f"each role, and each less one word: {said}", flush=True)
        return code
    code, said = run(name, jobs)
    where = "what others leave out since they may not" if name == "admin" else " ".join(PROGRAMS[name].folders)
    print(f"{name}: {where}: {said}", flush=True)
    for why, tests in PROGRAMS[name].without.items():
        print(f"    without what {why}:", *tests, sep="\n        ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
