"""Run one incident on a live system, and judge what is seen of it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

from idemgate.audit.catalogue import CATALOGUE
from tools.night.incidents import CALM, INCIDENTS, Answer, Calm, Found, Gone
from tools.night.live import Alert, Failed, Live

__all__ = ["WITHIN", "Result", "run"]

WITHIN = 30.0
"""Seconds after the threshold of a finding in which `status` and an alert must show it."""
GONE_WITHIN = 180.0
"""Seconds in which a finding must be gone: backlogs drain, leases end, and processes report."""
EVERY = 0.5
"""Seconds between two looks."""


@dataclass
class Result:
    """What became of one run.

    Attributes:
        name, seed: the incident.
        problem: what did not hold, or "".
        lags: of `status` and of the alert, for each finding: the seconds after its threshold.
        gone: the seconds that findings took to be gone.
        commands: the printed commands that ran.
        seconds: how long it took.
        folder: where the logs are, if something did not hold.
    """

    name: str
    seed: int
    problem: str = ""
    lags: dict[str, list[float]] = field(default_factory=lambda: {"status": [], "alert": []})
    gone: list[float] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    seconds: float = 0
    folder: str = ""


def run(name: str, seed: int, *, quick: bool = False, minutes: float = 1) -> Result:
    """Run an incident with a seed on a system of its own."""
    result, began = Result(name, seed), monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"night-{name}-{seed}-"))
    try:
        with Live(folder, f"{name}-{seed}", quick=quick, minutes=minutes) as live:
            judge = _Judge(live, result)
            judge.stay_calm(1 if quick else 5)
            for step in (INCIDENTS | CALM)[name](live, Random(f"{name} {seed}")):
                judge.judge(step)
    except Failed as failed:
        result.problem = str(failed)
    except Exception:
        result.problem = traceback.format_exc()
    result.seconds = monotonic() - began
    if result.problem:
        result.folder = str(folder)
    else:
        shutil.rmtree(folder)
    return result


class _Judge:
    """Judges the steps of one run, in which it notes what it measures."""

    def __init__(self, live: Live, result: Result) -> None:
        self._live, self._result = live, result
        self._allowed: set[str] = set()
        """The kinds that may be found by now."""

    def judge(self, step: Found | Gone | Answer | Calm) -> None:
        """Return when the step has held. Raises Failed."""
        if isinstance(step, Found):
            self._find(step)
        elif isinstance(step, Gone):
            self._await_gone(step)
        elif isinstance(step, Answer):
            self.stay_calm(3 if self._live.quick else WITHIN + 5)
            self._ask(step)
        else:
            self.stay_calm(step.seconds)

    def stay_calm(self, seconds: float) -> None:
        """Look for so long that nothing is found, and that no alert fires."""
        end = monotonic() + seconds
        while monotonic() < end:
            self._look()
            sleep(EVERY)

    def _look(self) -> tuple[list[dict[str, Any]], set[Alert]]:
        """Return the findings and the alerts. Raises Failed for one that does not follow from the incident."""
        found, alerts = self._live.status()["findings"], self._live.alerts()
        for one in found:
            if one["id"] not in self._allowed:
                raise Failed(f"unexpected finding {one['id']} of {one['of']!r} {one['key']!r}: {one['what']}")
        for alert in alerts:
            if alert.kind not in self._allowed:
                raise Failed(f"unexpected alert {alert}")
        return found, alerts

    # -- findings -----------------------------------------------------------------------------------------------------

    def _find(self, step: Found) -> None:
        """Wait for the finding and its alert, then run the printed command."""
        self._allowed |= {step.kind, *step.also}
        true_at, lags, finding = monotonic() + step.after, dict[str, float](), None
        while len(lags) < 2:
            found, alerts = self._look()
            late = monotonic() - true_at
            if matching := [one for one in found if _matches(step, one)]:
                finding = matching[0]
                lags.setdefault("status", late)
            if Alert(step.kind, step.of) in alerts:
                lags.setdefault("alert", late)
            if late > 3 * WITHIN:
                others = [(one["id"], one["of"], one["key"], one["where"], one["what"]) for one in found]
                raise Failed(f"{step} is not shown: {lags}. Found: {others}, alerts: {alerts}")
            sleep(EVERY)
        for name, late in lags.items():
            self._result.lags[name].append(late)
        if max(lags.values()) > WITHIN:
            raise Failed(f"{step.kind} is shown {lags} s after its threshold")
        assert finding is not None
        if finding["cause"] != CATALOGUE[step.kind].cause:
            raise Failed(f"{step.kind} has no cause")
        self._mend(finding["mend"], step.shows)

    def _mend(self, line: str, shows: tuple[str, ...]) -> None:
        """Run a command as it is printed."""
        if not line or re.search(r"<\w+>|\b(TOPIC|KEY|SCOPE|NAME)\b|\.\.\.", line):
            raise Failed(f"this is no command: {line!r}")
        self._result.commands.append(line)
        printed = self._live.mend(line)
        if missing := [text for text in shows if text not in printed]:
            raise Failed(f"`{line}` does not show {missing}: {printed}")

    def _await_gone(self, step: Gone) -> None:
        began, mended = monotonic(), 0.0
        while still := [one for one in self._look()[0] if one["id"] == step.kind]:
            if monotonic() - began > GONE_WITHIN:
                raise Failed(f"{step.kind} is still found: {still}")
            if step.again and monotonic() - mended > 5:
                mended = monotonic()
                self._mend(still[0]["mend"], ())
            sleep(EVERY)
        self._result.gone.append(monotonic() - began)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _ask(self, step: Answer) -> None:
        """Ask `key show` of a key, as text and as JSON."""
        printed = self._live.run("key", "show", "--", step.key)
        shown = json.loads(self._live.run("key", "show", "--json", "--", step.key))
        for row in step.timeline:
            if not any(all(text in (one[name] or "") for name, text in row.items()) for one in shown["timeline"]):
                raise Failed(f"`key show` does not tell {row} of {step.key!r}: {shown['timeline']}")
        if missing := [text for text in step.says if text not in printed]:
            raise Failed(f"`key show` does not print {missing}: {printed}")


def _matches(step: Found, one: dict[str, Any]) -> bool:
    """Return True if a finding names the kind, the subject and the facts of a step."""
    subject = all(
        bool(one[name]) if wanted is None else one[name] == wanted
        for name, wanted in (("of", step.of), ("key", step.key), ("where", step.where))
    )
    return one["id"] == step.kind and subject and all(text in one["what"] for text in step.says)
