"""The table of all verbs."""

from __future__ import annotations

from idemgate.operate.acts import list_acts
from idemgate.operate.dead import DEAD_VERBS
from idemgate.operate.held import HELD_VERBS
from idemgate.operate.keys import KEY_VERBS
from idemgate.operate.scopes import SCOPE_VERBS
from idemgate.operate.topics import GROUP_VERBS, TOPIC_VERBS
from idemgate.operate.verb import Parameter, Verb
from idemgate.operate.workers import WORKER_VERBS

__all__ = ["VERBS"]

VERBS: tuple[Verb, ...] = (
    *KEY_VERBS,
    *SCOPE_VERBS,
    *TOPIC_VERBS,
    *GROUP_VERBS,
    *DEAD_VERBS,
    *HELD_VERBS,
    *WORKER_VERBS,
    Verb(
        "act", "ls", "list the changes that operators asked for, newest first", list_acts,
        (Parameter("limit", "the most acts (default: 50)", "count"),), tells_past=True,
    ),
)  # fmt: skip
