"""The counters and the log of consumers: how the messages of a broker were settled."""

from __future__ import annotations

import logging
from typing import Any

from idemgate.core.counters import Counters
from idemgate.core.text import event_log, message_of, one_line
from idemgate.core.verdict import Verdict

__all__ = ["record_settlement"]

log: logging.Logger = event_log("idemgate.consumer")


def record_settlement(
    counters: Counters, scope: str, verdict: Verdict[Any], message_id: object, error: BaseException | None
) -> None:
    """Count and log one settlement; see `Gate.record_settlement`."""
    facts: dict[str, Any] = {"scope": scope, "id": message_id}
    if error is not None:
        counters.add("consumer.unsettled")
        log.warning(
            "consumer.unsettled scope=%r id=%r outcome=%s: %s: %s", *facts.values(), verdict.outcome,
            type(error).__name__, one_line(message_of(error)), extra=facts | {"outcome": verdict.outcome},
        )  # fmt: skip
        return
    counters.add(f"consumer.{verdict.outcome}")
    facts["attempt"] = verdict.attempt
    if verdict.outcome == "rejected":
        log.error("consumer.rejected scope=%r id=%r attempt=%d", *facts.values(), exc_info=verdict.error, extra=facts)
    elif verdict.outcome == "failed":
        log.warning("consumer.failed scope=%r id=%r attempt=%d", *facts.values(), exc_info=verdict.error, extra=facts)
    elif verdict.outcome == "lost":
        log.warning("consumer.lost scope=%r id=%r attempt=%d", *facts.values(), exc_info=verdict.error, extra=facts)
