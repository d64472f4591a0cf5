"""Access lists: which commands, keys and channels of a Redis server each role needs, and nothing else.

What a role may do is derived from the scripts that it runs, since the server checks what a script calls as if the
caller had sent it. A role that may run scripts may run any script with the same commands on the same keys: the keys
are what keeps roles and tenants apart, so a producer, who has the keys of the topics, could also take from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from idemgate.core.keys import check_name, patterns
from idemgate.errors import InvalidArgument
from idemgate.lua import commands, names

__all__ = ["ROLES", "Role", "rule", "user_name"]


class Role(NamedTuple):
    """`scripts` it runs, what the client sends `beside` them, and the names of the `patterns` of its keys; whether it
    is `heard`: channels of the same names, to wake others and to be woken (of seen-sets there are none)."""

    about: str
    scripts: Sequence[str]
    beside: str
    keys: Sequence[str]
    heard: bool = True


_LISTENS = "SUBSCRIBE UNSUBSCRIBE"
_OPENS = ("topics/open", "topics/policy", "reshard/reopen")
"""What finds a topic: at first, and again once a slot has moved; one that was forgotten meanwhile is made anew."""
_SEES = ("topics/peek", "topics/registry", "topics/stats")
_PUTS = (*_OPENS, *_SEES, "topics/cancel", "topics/flush", "topics/reschedule", "topics/results", "topics/trigger")
_LOOKS = (*_SEES, "topics/audit", "topics/dead", "topics/policy")
_WORKS = ("topics/extend", "topics/forward", "topics/settle", "topics/take", "topics/settle_and_take")

ROLES = {
    "guard": Role(
        "guards functions: once, claim, first, inspect, forget, resolve",
        [name for name in names() if name.startswith(("guard/", "dedup/"))],
        _LISTENS,
        ["records", "dedup"],
    ),
    "producer": Role(
        "puts messages into topics: trigger, result, cancel, reschedule, flush", _PUTS, _LISTENS, ["topics"]
    ),
    "worker": Role(
        "takes from topics, handles, forwards; a member of a group of workers",
        [*_PUTS, *_WORKS, "members/heartbeat", "members/leave", "members/list"],
        _LISTENS,
        ["topics", "members"],
    ),
    "subscriber": Role(
        "hears Pub/Sub, streams, lists and keys that expire; name their --keys and --channels",
        ["expiry/ttl", "lists/renew", "lists/settle", "lists/take"],
        "SUBSCRIBE PSUBSCRIBE ROLE SCAN BLMOVE "
        "XACK XADD XAUTOCLAIM XCLAIM XGROUP|CREATE XGROUP|DELCONSUMER XPENDING XREADGROUP XTRIM",
        [],
    ),
    "viewer": Role(
        "looks, and writes nothing: inspect, peek, stats, dead letters, which topics there are",
        ["guard/inspect", *_LOOKS],
        "HGETALL ZRANGEBYSCORE",  # of members/list, whose library writes for others
        ["records", "topics", "members"],
        heard=False,
    ),
    "auditor": Role(
        "runs idemgate doctor --audit --read-only, and writes nothing; SCAN shows names of other keys, too",
        ["guard/inspect", "topics/audit", "topics/stats"],
        "EXEC HMGET INFO MULTI SCAN ZRANGEBYSCORE",
        ["all"],
        heard=False,
    ),
    "admin": Role(
        "everything that idemgate can do in its namespace; SCAN, for the auditor, shows names of other keys, too",
        names(),
        f"INFO {_LISTENS} EXEC MULTI SCAN",
        ["all"],
    ),
}

_DURABLE = "PEXPIRE SET WAIT"
_DURABLE_7_2 = "WAITAOF"
_ALL = "EVAL EVALSHA PING SELECT CLIENT|SETNAME"
_CLUSTER = "ASKING CLUSTER|SLOTS"
_STATE = "CLUSTER|INFO"
"""What else is asked of a cluster by who asks servers of themselves."""
SINCE_7_2 = "CLIENT|SETINFO"
"""Redis 7.0 does not take a rule that names a subcommand it does not know; 6.2 takes any. Clients send it everywhere
and do without: only the server's ACL LOG notes each refusal."""


def user_name(roles: Iterable[str], namespace: str) -> str:
    """Return the default name of a user with these roles."""
    return "-".join([namespace, *roles])


def rule(
    roles: Iterable[str],
    namespace: str,
    user: str,
    *,
    keys: Iterable[str] = (),
    channels: Iterable[str] = (),
    cluster: bool = False,
    durable: bool = False,
    since_7_2: bool = False,
) -> list[str]:
    """The words of the ACL SETUSER that gives a user these roles, and no others. Passwords stay as they are: a new user
    has none and cannot log in before it is given one.

    `keys` and `channels` are patterns of the user's own: what is forwarded to, streams, keys that expire. `cluster`:
    what a client of a cluster asks, too. `durable`: what a gate with `durability=` asks, too ("fsync" only with
    `since_7_2`: the server knows what Redis 7.2 does). InvalidArgument for what no rule can say.
    """
    chosen = [_role(name) for name in roles]
    known = patterns(namespace)
    ours = list(dict.fromkeys(known[name] for role in chosen for name in role.keys))
    heard = list(dict.fromkeys(known[name] for role in chosen if role.heard for name in role.keys if name != "dedup"))
    if durable:
        ours.append(known["durability"])
    asked = {command for role in chosen for command in _required_commands(role)}
    asked.update(_ALL.split(), _CLUSTER.split() if cluster else (), _DURABLE.split() if durable else ())
    if cluster and "INFO" in asked:
        asked.add(_STATE)
    if since_7_2:
        asked.update(SINCE_7_2.split(), _DURABLE_7_2.split() if durable else ())
    return [
        "ACL", "SETUSER", check_name(user, "user"), "on", *(["clearselectors"] if since_7_2 else []),
        "resetkeys", "resetchannels", "-@all",
        *(f"~{pattern}" for pattern in [*ours, *(_pattern(one, "keys") for one in keys)]),
        *(f"&{pattern}" for pattern in [*heard, *(_pattern(one, "channels") for one in channels)]),
        *(f"+{command.lower()}" for command in sorted(asked)),
    ]  # fmt: skip


def _role(name: str) -> Role:
    if name not in ROLES:
        raise InvalidArgument("role", name, "no such role", f"Use one of {', '.join(ROLES)}")
    return ROLES[name]


def _required_commands(role: Role) -> set[str]:
    return {command for name in role.scripts for command in commands(name)} | set(role.beside.split())


def _pattern(text: str, name: str) -> str:
    if not text or not text.isprintable() or any(char in text for char in " \"'"):
        raise InvalidArgument(name, text, "not a pattern that a rule can hold", "Use a glob without spaces and quotes")
    return text
