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

__all__ = ["NOUNS", "VERBS"]

NOUNS = {
    "key": "guarded keys: show, forget, resolve, cancel",
    "scope": "scopes of guarded keys: move",
    "topic": "topics and their messages",
    "group": "groups whose messages wait",
    "dead": "dead letters: list, export, import, redrive, delete",
    "held": "keys whose owner lost its lease and that wait for a decision",
    "worker": "the processes that use the namespace: workers, subscribers, clients",
    "act": "what operators changed",
}
"""What each noun is about, in the order of the help."""


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
