"""What a server's own words mean for what idemgate promises: pure checks over INFO, CONFIG and two clocks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from idemgate.subscribers.expiry.rules import added, missing

__all__ = ["OLDEST", "Check", "Seen", "State", "diagnose", "durable", "notifications"]

State = Literal["ok", "warning", "error", "skipped"]
OLDEST = (6, 2)
APART = 5.0
"""Seconds that two clocks may differ before absolute times (`at=`) mean something else here and there."""
JUMP = 0.5
"""Seconds by which a server's clock may disagree with the time that passed here while it was looked at."""


class Check(NamedTuple):
    """One line of the diagnosis: `mend` is the command, or the setting, that makes it well."""

    name: str
    state: State
    what: str
    mend: str = ""


class Seen(NamedTuple):
    """What one server said. `config`: None where it may not be asked; `apart`: seconds its clock is ahead of ours,
    None where it may not be asked; `jumped`: seconds it gained or lost while it was looked at; `in_cluster`: we came to
    it as to a cluster."""

    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    apart: float | None
    jumped: float
    in_cluster: bool
    cluster: Mapping[str, str]

    def setting(self, name: str, otherwise: str = "") -> str:
        return (self.config or {}).get(name, otherwise)

    def number(self, name: str) -> int:
        return int(self.info.get(name, 0) or 0)


def diagnose(seen: Seen) -> list[Check]:
    """Every check, in the order in which people read them."""
    if not seen.info:
        what = "it may not be asked (INFO): version, eviction, memory and persistence are not known"
        return [Check("server", "skipped", what), *_clock(seen)]
    checks = (_server, _role, _eviction, _memory, _persistence, _written, _replicas, _cluster, _clock, _clients)
    return [found for check in checks for found in check(seen)]


def _set(name: str, value: str) -> str:
    return f"CONFIG SET {name} {value}   (then CONFIG REWRITE)"


def _server(seen: Seen) -> Iterator[Check]:
    valkey = str(seen.info.get("valkey_version", ""))
    version = valkey or str(seen.info.get("redis_version", "0"))
    name = f"{'Valkey' if valkey else 'Redis'} {version}"
    others = [word for word in ("dragonfly_version", "kvrocks_version", "garnet_version") if word in seen.info]
    if others:
        what = f"{others[0].partition('_')[0]} {seen.info[others[0]]}: not tested with idemgate"
        yield Check("server", "warning", what, "use Redis >= 6.2 or Valkey")
    elif tuple(map(int, re.findall(r"[0-9]{1,9}", version))) < OLDEST:
        yield Check("server", "error", f"{name} is too old", "use Redis >= 6.2 or Valkey")
    else:
        yield Check("server", "ok", name)


def _role(seen: Seen) -> Iterator[Check]:
    if seen.info.get("role", "master") != "master":
        where = f"{seen.info.get('master_host')}:{seen.info.get('master_port')}"
        yield Check("role", "error", "a replica: it refuses every write", f"connect to its primary, {where}")
    if seen.number("loading"):
        yield Check("role", "error", "it is still loading its data", "wait, and look again")


def _eviction(seen: Seen) -> Iterator[Check]:
    policy, limit = str(seen.info.get("maxmemory_policy", "noeviction")), seen.number("maxmemory")
    mend = _set("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        when = "when memory is full" if limit else "as soon as maxmemory is set"
        what = f"{policy}: {when}, records and messages are dropped without a word"
        yield Check("eviction", "error" if limit else "warning", what, mend)
    else:
        yield Check("eviction", "ok", "noeviction")
    if seen.number("evicted_keys"):
        what = f"{seen.number('evicted_keys'):,} keys were evicted since the server started: some may have been ours"
        yield Check("evicted", "error", what, f"{mend}; then idemgate doctor --audit")


def _memory(seen: Seen) -> Iterator[Check]:
    used, limit = seen.number("used_memory"), seen.number("maxmemory")
    room = limit or seen.number("total_system_memory")
    if not room:
        yield Check("memory", "skipped", "the server does not say how much there is")
        return
    share = used / room
    what = f"{_size(used)} of {_size(room)}{'' if limit else ' (the machine; no maxmemory)'}, {share:.0%}"
    mend = "more memory, a shorter retention, or fewer dead letters"
    if share >= 0.95:
        yield Check("memory", "error", f"{what}: new claims and triggers are refused, or soon will be", mend)
    elif share >= 0.8:
        yield Check("memory", "warning", what, mend)
    else:
        yield Check("memory", "ok", what)


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count = round(count / 1024)
    return f"{count:,} {unit}"


def _persistence(seen: Seen) -> Iterator[Check]:
    fsync, snapshots = seen.setting("appendfsync", "everysec"), seen.setting("save")
    if seen.number("aof_enabled") and seen.config is None:
        yield Check("persistence", "ok", "append-only file; how often it is synced may not be asked (CONFIG)")
        return
    if seen.number("aof_enabled"):
        lost = {"always": "a crash loses nothing", "everysec": "a crash of the machine loses up to about 2 s"}
        if fsync in lost:
            yield Check("persistence", "ok", f"append-only file, fsync {fsync}: {lost[fsync]}")
        else:
            what = f"append-only file, fsync {fsync}: a crash of the machine loses up to 30 s and more"
            yield Check("persistence", "warning", what, _set("appendfsync", "everysec"))
        return
    mend = _set("appendonly", "yes")
    if seen.config is None:
        what = "no append-only file, and the rest may not be asked: a crash forgets what no snapshot has"
        yield Check("persistence", "warning", what, mend)
    elif not snapshots:
        what = "none: a restart forgets what was done, which may run again, and every message"
        yield Check("persistence", "error", what, mend)
    else:
        seconds = max(int(word) for word in snapshots.split()[::2])
        what = f"snapshots only: a crash forgets up to {seconds:,} s of claims and messages that were accepted"
        yield Check("persistence", "warning", what, mend)


def _written(seen: Seen) -> Iterator[Check]:
    if seen.info.get("aof_last_write_status", "ok") != "ok":
        yield Check("disk", "error", "the append-only file cannot be written", "look at the server's log and disk")
    elif seen.info.get("rdb_last_bgsave_status", "ok") != "ok":
        stops = seen.setting("stop-writes-on-bgsave-error", "yes") == "yes"
        what = "the last snapshot failed" + (", so that every write is refused" if stops else "")
        yield Check("disk", "error" if stops else "warning", what, "look at the server's log and disk")


def _replicas(seen: Seen) -> Iterator[Check]:
    count = seen.number("connected_slaves")
    if not count:
        return
    needed = seen.setting("min-replicas-to-write", "0")
    if needed == "0" and seen.config is not None:
        what = f"{count}, none of which has to be there: a primary that is cut off accepts what a failover forgets"
        yield Check("replicas", "warning", what, _set("min-replicas-to-write", "1"))
    else:
        yield Check("replicas", "ok", f"{count}, {needed} of them must be there for a write")


def _cluster(seen: Seen) -> Iterator[Check]:
    if seen.number("cluster_enabled") and not seen.in_cluster:
        what = "the server is a node of a cluster, and the URL is that of a single server"
        yield Check("cluster", "error", what, "redis+cluster://host:port instead of redis://host:port")
        return
    if seen.in_cluster and not seen.cluster:
        yield Check("cluster", "skipped", "its state may not be asked (CLUSTER INFO)")
    if not seen.cluster:
        return
    state, assigned = seen.cluster.get("cluster_state", "?"), seen.cluster.get("cluster_slots_assigned", "?")
    failing = int(seen.cluster.get("cluster_slots_pfail", 0)) + int(seen.cluster.get("cluster_slots_fail", 0))
    what = f"state {state}, {assigned} of 16384 slots assigned, {failing} failing"
    if state != "ok" or assigned != "16384":
        yield Check("cluster", "error", what, "redis-cli --cluster fix host:port")
    elif failing:
        yield Check("cluster", "warning", what, "redis-cli --cluster check host:port")
    else:
        yield Check("cluster", "ok", what)


def _clock(seen: Seen) -> Iterator[Check]:
    if seen.apart is None:
        yield Check("clock", "skipped", "it may not be asked (TIME)")
        return
    mend = "run an NTP client on both machines, and let it slew instead of step"
    if abs(seen.jumped) > JUMP:
        what = f"the server's clock jumped by {seen.jumped:+.1f} s while it was looked at: leases may lapse early"
        yield Check("clock", "error", what, mend)
    elif abs(seen.apart) > APART:
        what = f"the server is {abs(seen.apart):.1f} s {'ahead' if seen.apart > 0 else 'behind'}: at= means its time"
        yield Check("clock", "warning", what, mend)
    else:
        yield Check("clock", "ok", f"{round(seen.apart * 1000):+d} ms from ours, steady")


def _clients(seen: Seen) -> Iterator[Check]:
    there, most = seen.number("connected_clients"), seen.number("maxclients")
    if most and there >= 0.9 * most:
        what = f"{there:,} of {most:,} connections are taken"
        yield Check("connections", "warning", what, _set("maxclients", str(2 * most)))


def durable(policies: Collection[str]) -> Check:
    """Of a write that got as durable as asked. `policies`: appendfsync of the servers, where a sync was asked for."""
    if "everysec" not in policies:
        return Check("durability", "ok", "a write gets as durable as asked")
    what = "WAITAOF answered, but under `appendfsync everysec` that of some servers does so before the sync"
    return Check("durability", "warning", what, _set("appendfsync", "always"))


def notifications(flags: str | None) -> Check:
    """Of a namespace that listens to keys that expire. `flags`: notify-keyspace-events, None if it may not be asked."""
    if flags is None:
        return Check("expiry", "skipped", "whether the server tells of keys that expire may not be asked")
    if missing(flags):
        what = f"gate.expiry is used, and the server does not tell of keys that expire (flags {flags!r})"
        return Check("expiry", "warning", what, _set("notify-keyspace-events", added(flags)))
    return Check("expiry", "ok", "the server tells of keys that expire")
