"""The judge of the effects that guarded consumers report in a soak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

__all__ = ["Judge"]


class Judge:
    """The judge of all effects. Each second effect needs a documented reason."""

    def __init__(self, events: Iterator[list[Any]]) -> None:
        self.effects: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.ended: dict[tuple[str, int], str] = {}
        self.killed: set[int] = set()
        self.reasons: Counter[str] = Counter()
        self.late = self.unstored = 0
        self.wrong: list[str] = []
        for kind, *facts in events:
            getattr(self, f"_record_{kind}")(*facts)

    def _record_effect(self, message_id: str, token: int, pid: int) -> None:
        self.effects[message_id].append((token, pid))

    def _record_ended(self, message_id: str, token: int, pid: int, outcome: str) -> None:
        self.ended.setdefault((message_id, token), outcome)  # a later one says that the acknowledgement was cancelled

    def _record_killed(self, pid: int) -> None:
        self.killed.add(pid)

    def judge(self, message_id: str, record: Any, is_dead: bool) -> None:
        """Judge all effects of one id by the record of its key.

        The last effect is that of the recorded completion, or of a run whose completion was not stored and whose
        message was acknowledged. All others are second effects.
        """
        effects = [(token, self._reason(message_id, token, pid)) for token, pid in self.effects.get(message_id, [])]
        tokens, unstored = [token for token, _ in effects], [token for token, why in effects if why == "not stored"]
        if record.state == "done":
            last, latest = record.token, record.token
        else:
            last, latest = max(unstored, default=None), record.token  # a later run may have failed
            self.unstored += last is not None
        if last not in tokens and not (last is None and is_dead):
            self.wrong.append(f"{message_id}: lost, or done without an effect: {effects}, record {record}")
        if len(tokens) != len(set(tokens)):
            self.wrong.append(f"{message_id}: two effects under one token: {effects}")
        for position, (token, reason) in enumerate(effects):
            self.late += token < max(tokens[: position + 1])
            self.reasons[reason] += token != last
            is_last = token == last and reason in {"handled", "not stored", "cancelled", "killed"}
            is_explained = token != last and reason in {"lost", "not stored", "cancelled", "killed"}
            if token > latest or not (is_last or is_explained):
                self.wrong.append(f"{message_id}: effect under {token} ({reason}), record {record}, all {effects}")

    def _reason(self, message_id: str, token: int, pid: int) -> str:
        """Return the outcome of the run that caused an effect."""
        return self.ended.get((message_id, token), "killed" if pid in self.killed else "no end, and not killed")
