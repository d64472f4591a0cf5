"""A warning about stored topics whose messages no handler of this program serves."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from idemgate.core.key_text import one_line
from idemgate.errors import StoreError
from idemgate.store.context import Context
from idemgate.topics.registry import stored_topics_async
from idemgate.topics.topic import Topic

__all__ = ["warn_about_unserved"]

log = logging.getLogger("idemgate.worker")
SHOWN = 10
"""The most topics that the warning names."""


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
