"""Event ids of the triggers that a guarded run makes.

If a process dies after a trigger and before the completion of the run, the next attempt makes the trigger again. If a
copy would change the payload, the trigger gets an event id. Both attempts share it, and the topic drops the copy.
"""

from __future__ import annotations

import dataclasses

from idemgate.core.codec import digest
from idemgate.core.keys import raw
from idemgate.guard.current import Execution
from idemgate.topics.merge import Merge
from idemgate.topics.messages import Trigger

__all__ = ["add_event_ids"]


def add_event_ids(triggers: list[Trigger], execution: Execution, topic: str, merge: Merge) -> list[Trigger]:
    """Return the triggers with event ids, if the merge policy counts copies. A given `event_id` stays.

    Raises InvalidArgument for a payload that cannot be stored.
    """
    if not merge.counts_copies:
        return triggers
    return [
        trigger
        if trigger.event_id is not None
        else dataclasses.replace(
            trigger,
            event_id=execution.next_event_id(topic, raw(trigger.key), digest(trigger.payload, name="payload")),
        )
        for trigger in triggers
    ]
