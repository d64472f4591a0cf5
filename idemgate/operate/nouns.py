"""What verbs are about. The help names them without the modules of the verbs."""

from __future__ import annotations

__all__ = ["NOUNS"]

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
