"""The topics that a worker serves, and a warning about stored topics that this program does not serve."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from idemgate.core.text import one_line
from idemgate.errors import InvalidArgument, StoreError
from idemgate.store.context import Context
from idemgate.topics.registry import stored_topics_async
from idemgate.topics.topic import Topic

__all__ = ["select_topics", "warn_about_unserved"]

log = logging.getLogger("idemgate.worker")
SHOWN = 10
"""The most topics that the warning names."""


def select_topics(gate_topics: Mapping[str, Topic], names: Sequence[str]) -> tuple[str, ...]:
    """Return the given topics, or all topics with work for a worker.

    Raises:
        InvalidArgument: A topic has no handler, or there is none at all.
    """
    selected = {name: topic for name, topic in gate_topics.items() if not names or name in names}
    workable = {name for name, topic in selected.items() if topic.definition.has_consumer}
    for name in names:
        if name not in workable:
            with_handler = sorted(
                name for name, topic in gate_topics.items() if topic.definition.handler or topic.definition.forward
            )
            raise InvalidArgument(
                "topics", name, "no handler is registered for it", f"Topics with a handler: {with_handler or 'none'}"
            )
    if not workable:
        raise InvalidArgument(
            "topics", names, "no topic of this gate has a handler", "Register one: @gate.topic(...).handler"
        )
    return tuple(dict.fromkeys(names)) or tuple(sorted(workable))


async def warn_about_unserved(context: Context, topics: Mapping[str, Topic]) -> None:
    """Log the stored topics with pending messages for which this program has no handler and no forward target.

    Another program may serve them. Often a program has other names for its topics than the one that triggers them. It
    takes one round trip, and one more if the store has such topics. Store errors are ignored: the worker reports them.
    """
    served = {name for name, topic in topics.items() if topic.definition.handler or topic.definition.forward}
    try:
        found = await stored_topics_async(context, without=served)
    except StoreError:
        return
    waiting = {topic.name: topic.stats.pending for topic in found if topic.stats.pending}
    if waiting:
        shown = ", ".join(f"{one_line(name)} ({pending})" for name, pending in [*waiting.items()][:SHOWN])
        more = f" and {len(waiting) - SHOWN} more" if len(waiting) > SHOWN else ""
        log.warning(
            "worker.unserved topics=%s%s: their messages wait, and this program has no handler for them. Register one, "
            "run the program that has it, or delete them: idemgate topics", shown, more, extra={"waiting": waiting},
        )  # fmt: skip
