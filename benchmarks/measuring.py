"""Repetitions, taken in turns so that all contestants see the same machine, and what each operation costs whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.contestants import Ask, begin, end
from benchmarks.server import spent, used_memory

__all__ = ["Row", "Step", "rounds", "spread"]

Row = dict[str, Any]
"""Of one contestant and one step: `who`, `step`, and lists of one figure a repetition: `rate` (operations a second);
`client_us` and `server_us` (CPU per operation); `script_us` (time in scripts, by the server's clock); `trips` (round
trips per operation); `bytes` (how the server's memory grew); and what a step adds."""
KEPT = ("p50", "p99", "max", "left")


class Step(NamedTuple):
    """One request to every contestant. `words` may differ per contestant: `only[name]` is laid over them. `label` names
    the row; None: a preparation, which makes no row. Steps with the same `of` concern the same keys."""

    name: str
    words: Mapping[str, Any]
    only: Mapping[str, Mapping[str, Any]] = {}
    label: str | None = ""
    of: str = ""


def rounds(server: Any, sides: Mapping[str, Ask], groups: Sequence[Sequence[Step]], repetitions: int) -> list[Row]:
    """Each group of steps by each contestant in turn, on an emptied server: those of a group build on each other. A
    shortened first round warms up and is not counted."""
    rows: dict[tuple[str, str], Row] = defaultdict(lambda: defaultdict(list))
    for repetition in range(-1, repetitions):
        for steps in groups:
            for who, side in sides.items():
                _turn(server, who, side, steps, repetition, rows)
        print(".", end="", flush=True)
    print()
    return [{"who": who, "step": step, **row} for (who, step), row in rows.items() if row]


def _turn(
    server: Any, who: str, side: Ask, steps: Sequence[Step], repetition: int, rows: dict[tuple[str, str], Row]
) -> None:
    server.flushall()
    for step in steps:
        words = {**step.words, **step.only.get(who, {}), "tag": f"r{repetition}{step.of}"}
        if repetition < 0:
            words |= _shortened(words)
        figures = _once(server, side, step.name, words)
        if repetition >= 0 and step.label is not None:
            _note(rows[who, step.label or step.name], figures)


def _shortened(words: Mapping[str, Any]) -> dict[str, Any]:
    shorter = {"n": max(200, words["n"] // 20)} if "n" in words else {}
    return shorter | ({"seconds": 0.2} if "seconds" in words else {})


def _once(server: Any, side: Ask, step: str, words: dict[str, Any]) -> Row:
    memory, before = used_memory(server), spent(server)
    begin(side, step, **words)
    answer = end(side)
    after = spent(server)
    ops = answer.get("ops", 0)
    if "error" in answer or "absent" in answer or not ops:
        return answer
    return {
        "rate": ops / answer["seconds"],
        "client_us": answer["cpu"] / ops * 1e6,
        "server_us": (after.cpu - before.cpu) / ops * 1e6,
        "script_us": (after.scripts - before.scripts) / ops * 1e6,
        "trips": (after.reads - before.reads - 3) / ops,  # three of them are our own question
        "bytes": (used_memory(server) - memory) / ops,
        "ops": ops,
        **{name: answer[name] for name in KEPT if name in answer},
    }


def _note(row: Row, figures: Row) -> None:
    if "error" in figures:
        row["error"] = figures["error"]
    elif "absent" not in figures:
        for name, figure in figures.items():
            row[name].append(figure)


def spread(figures: list[float]) -> tuple[float, float, float]:
    """(median, least, greatest)."""
    return median(figures), min(figures), max(figures)
