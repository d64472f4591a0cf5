"""Access lists: which commands, keys and channels of a Redis server each role needs, and nothing else.

The rights of a role follow from the scripts that it runs. The server checks each command of a script as if the caller
had sent it. A role may also run any other script with the same commands on the same keys. So only keys separate roles
and tenants: a producer has the keys of topics, and could also take from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from idemgate.core.keys import check_name, patterns
from idemgate.errors import InvalidArgument
from idemgate.lua import commands, names

__all__ = ["ROLES", "rule", "user_name"]


class Role(NamedTuple):
    """A role of users of the server.

    Attributes:
        about: what the role is for.
        scripts: the scripts that it runs.
        beside: the commands that its clients send without a script.
        keys: the names of its key patterns (`core.keys.patterns`).
        heard: whether it may use the channels of the same patterns. Dedup sets and scopes have none.
    """

    about: str
    scripts: Sequence[str]
    beside: str
    keys: Sequence[str]
    heard: bool = True


_LISTENS = "SUBSCRIBE UNSUBSCRIBE"
_TRIMS = "XINFO|GROUPS XPENDING XTRIM"
"""The commands that trim the streams into which a topic forwards."""
_FINDS = "EXISTS HSTRLEN"
"""The commands that tell which slots to read for a key."""
_OPENS = ("topics/open", "topics/policy", "topics/reshard/reopen")
"""The scripts that open a topic, at its first use and after a slot has moved. A deleted topic is created again."""
_SEES = ("topics/peek", "topics/registry", "topics/stats", "topics/versions/read")
_PUTS = (
    *_OPENS, *_SEES, "topics/cancel", "topics/count_refused", "topics/flush", "topics/pause", "topics/reschedule",
    "topics/versions/reset", "topics/results", "topics/trigger",
)  # fmt: skip
_LOOKS = (*_SEES, "topics/audit", "topics/dead", "topics/messages/list", "topics/policy")
_SHOWS = (
    "guard/inspect",
    "guard/scopes",
    "history/read",
    "operate/acts",
    "presence/list",
    "presence/names",
    "presence/read",
)
_REPORTS = ("presence/beat", "presence/leave")
_WORKS = (
    "topics/extend", "topics/forward", "topics/settle", "topics/settle_and_take", "topics/take", "topics/take_dead",
)  # fmt: skip
_RESHARDS = tuple(name for name in names() if name.startswith("topics/reshard/"))

ROLES = {
    "guard": Role(
        "guards functions: once, claim, first, inspect, forget, resolve",
        [
            *(name for name in names() if name.startswith(("guard/", "dedup/")) and name != "guard/scopes"),
            *_REPORTS,
        ],
        _LISTENS,
        ["records", "scopes", "history", "dedup", "presence"],
    ),
    "producer": Role(
        "puts messages into topics: trigger, result, cancel, reschedule, flush, pause",
        [*_PUTS, *_REPORTS],
        _LISTENS,
        ["topics", "presence"],
    ),
    "worker": Role(
        "takes from topics, handles, forwards, redrives; a member of a group of workers",
        [*_PUTS, *_WORKS, *_REPORTS, "membership/heartbeat", "membership/leave", "membership/list"],
        f"{_LISTENS} {_TRIMS}",
        ["topics", "members", "presence"],
    ),
    "subscriber": Role(
        "consumes Pub/Sub, streams, lists and expired keys; name their --keys and --channels",
        [
            *_REPORTS,
            "subscribers/expiry/ttl",
            "subscribers/lists/renew",
            "subscribers/lists/settle",
            "subscribers/lists/take",
            "subscribers/streams/leave",
            "subscribers/streams/release",
            "subscribers/streams/renew",
        ],
        "SUBSCRIBE PSUBSCRIBE ROLE SCAN BLMOVE "
        "XACK XADD XAUTOCLAIM XCLAIM XGROUP|CREATE XINFO|CONSUMERS XPENDING XREADGROUP XTRIM",
        ["presence"],
    ),
    "viewer": Role(
        "reads only: inspect, peek, versions, stats, dead letters, list of topics, acts of operators, processes",
        [*_SHOWS, *_LOOKS],
        f"{_FINDS} HGETALL ZRANGEBYSCORE",  # two of membership/list, whose library writes for others
        ["records", "scopes", "history", "topics", "members", "acts", "presence"],
        heard=False,
    ),
    "operator": Role(
        "runs the commands of `idemgate key`, `topic`, `group`, `dead`, `act` and `worker`",
        [
            *_SHOWS,
            *_LOOKS,
            *_PUTS,
            *_RESHARDS,
            "guard/cancel",
            "guard/forget",
            "guard/note",
            "guard/register",
            "guard/resolve",
            "operate/record",
            "topics/dead/adopt",
            "topics/dead/load",
            "topics/take_dead",
        ],
        _FINDS,
        ["records", "scopes", "history", "topics", "acts", "presence"],
    ),
    "auditor": Role(
        "runs idemgate doctor --audit --read-only, and writes nothing; SCAN shows names of other keys, too",
        ["guard/inspect", "topics/audit", "topics/stats"],
        "EXEC HMGET INFO LRANGE MULTI SCAN ZRANGEBYSCORE",
        ["all"],
        heard=False,
    ),
    "admin": Role(
        "everything that idemgate can do in its namespace; SCAN, for the auditor, shows names of other keys, too",
        names(),
        f"INFO {_LISTENS} EXEC MULTI SCAN {_TRIMS}",
        ["all"],
    ),
}

_SILENT = ("dedup", "scopes", "history", "acts", "presence")
"""The key patterns that are no channels."""
_DURABLE = "PEXPIRE SET WAIT"
_DURABLE_7_2 = "WAITAOF"
_ALL = "EVAL EVALSHA PING SELECT CLIENT|SETNAME"
_CLUSTER = "ASKING CLUSTER|SLOTS"
_STATE = "CLUSTER|INFO"
"""The command by which the doctor asks the nodes of a cluster for their state."""
SINCE_7_2 = "CLIENT|SETINFO"
"""A command that clients send to each server and do not need. Each refusal is logged in the server's ACL LOG.

Redis 7.0 rejects a rule with a subcommand that it does not know. Redis 6.2 accepts any.
"""
_PLAIN = "PEXPIRETIME"
"""The command without which the guard uses its scripts only. Redis 6.2 rejects a rule with it."""


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
    """Return the words of the ACL SETUSER that gives a user these roles and no others.

    Passwords stay unchanged. A new user has none, and cannot log in until it gets one.

    Args:
        roles: the names of the roles.
        namespace: the namespace whose keys and channels the user may use.
        user: the name of the user.
        keys: patterns of further keys: forward targets, streams, keys that expire.
        channels: patterns of further channels.
        cluster: add the commands that a client of a cluster sends.
        durable: add the commands of a gate with `durability=`. "fsync" needs `since_7_2`.
        since_7_2: the server knows the commands and selectors of Redis 7.2. The guard needs one of them to claim and
            complete keys without scripts, on Valkey 8.1 and Redis 8.4, and each reader needs it for these records.

    Raises:
        InvalidArgument: a role, a name or a pattern is invalid.
    """
    chosen = [_role(name) for name in roles]
    known = patterns(namespace)
    ours = list(dict.fromkeys(known[name] for role in chosen for name in role.keys))
    heard = list(
        dict.fromkeys(known[name] for role in chosen if role.heard for name in role.keys if name not in _SILENT)
    )
    if durable:
        ours.append(known["durability"])
    asked = {command for role in chosen for command in _required_commands(role)}
    asked.update(_ALL.split(), _CLUSTER.split() if cluster else (), _DURABLE.split() if durable else ())
    if cluster and "INFO" in asked:
        asked.add(_STATE)
    if since_7_2:
        asked.update(SINCE_7_2.split(), _DURABLE_7_2.split() if durable else ())
    else:
        asked.discard(_PLAIN)
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
