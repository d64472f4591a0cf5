"""Checks of a server's configuration and state: pure functions over INFO, CONFIG and the clocks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from idemgate.subscribers.expiry.rules import add_event_flags, missing

__all__ = ["Check", "Seen", "diagnose", "durable", "notifications"]

CheckState = Literal["ok", "warning", "critical", "skipped"]
OLDEST = (6, 2)
APART = 5.0
"""The maximum difference of the client's and the server's clock in seconds. Beyond it, `at=` is ambiguous."""
JUMP = 0.5
"""The maximum jump of the server's clock during the checks, in seconds."""


_CONFIG = ("appendfsync", "min-replicas-to-write", "save", "stop-writes-on-bgsave-error")
_INFO = (
    "aof_enabled", "aof_last_write_status", "cluster_enabled", "connected_clients", "connected_slaves",
    "dragonfly_version", "evicted_keys", "garnet_version", "kvrocks_version", "loading", "master_host", "master_port",
    "maxclients", "maxmemory", "maxmemory_policy", "rdb_last_bgsave_status", "redis_version", "role",
    "total_system_memory", "used_memory", "valkey_version",
)  # fmt: skip


class Check(NamedTuple):
    """One line of the diagnosis. `mend` is the command or setting that repairs the problem."""

    name: str
    state: CheckState
    what: str
    mend: str = ""


class Seen(NamedTuple):
    """The state of one server.

    Attributes:
        info: the reply to INFO; empty without permission.
        config: the reply to CONFIG GET; None without permission.
        apart: the seconds that its clock is ahead of the client's; None without permission for TIME.
        jumped: the seconds that its clock gained or lost during the checks.
        in_cluster: the client connected in cluster mode.
        cluster: the reply to CLUSTER INFO; empty without permission.
    """

    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    apart: float | None
    jumped: float
    in_cluster: bool
    cluster: Mapping[str, str]

    def reduce(self) -> Seen:
        """Return it without what no check reads. CONFIG has passwords."""
        config = None if self.config is None else {name: self.config[name] for name in _CONFIG if name in self.config}
        return self._replace(info={name: self.info[name] for name in _INFO if name in self.info}, config=config)

    def setting(self, name: str, otherwise: str = "") -> str:
        return (self.config or {}).get(name, otherwise)

    def number(self, name: str) -> int:
        return int(self.info.get(name, 0) or 0)


def diagnose(seen: Seen) -> list[Check]:
    """Run all checks, in the order of the report."""
    if not seen.info:
        what = "no permission for INFO: version, eviction, memory and persistence are unknown"
        return [Check("server", "skipped", what), *_clock(seen)]
    checks = (_server, _role, _eviction, _memory, _persistence, _disk, _replicas, _cluster, _clock, _clients)
    return [found for check in checks for found in check(seen)]


def _config_command(name: str, value: str) -> str:
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
        yield Check("server", "critical", f"{name} is too old", "use Redis >= 6.2 or Valkey")
    else:
        yield Check("server", "ok", name)


def _role(seen: Seen) -> Iterator[Check]:
    if seen.info.get("role", "master") != "master":
        where = f"{seen.info.get('master_host')}:{seen.info.get('master_port')}"
        yield Check("role", "critical", "a replica: it rejects every write", f"connect to its primary, {where}")
    if seen.number("loading"):
        yield Check("role", "critical", "it is still loading its data", "wait, and check again")


def _eviction(seen: Seen) -> Iterator[Check]:
    policy, limit = str(seen.info.get("maxmemory_policy", "noeviction")), seen.number("maxmemory")
    mend = _config_command("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        when = "when memory is full" if limit else "as soon as maxmemory is set"
        what = f"{policy}: {when}, records and messages are evicted silently"
        yield Check("eviction", "critical" if limit else "warning", what, mend)
    else:
        yield Check("eviction", "ok", "noeviction")
    if seen.number("evicted_keys"):
        what = (
            f"{seen.number('evicted_keys'):,} keys were evicted since the server started; some may belong to idemgate"
        )
        mend = "idemgate doctor --audit   (repair what it finds; then CONFIG RESETSTAT ends this finding)"
        yield Check("evicted", "critical", what, mend)


def _memory(seen: Seen) -> Iterator[Check]:
    used, limit = seen.number("used_memory"), seen.number("maxmemory")
    room = limit or seen.number("total_system_memory")
    if not room:
        yield Check("memory", "skipped", "the server does not report the available memory")
        return
    share = used / room
    what = (
        f"{_format_bytes(used)} of {_format_bytes(room)}{'' if limit else ' (the machine; no maxmemory)'}, {share:.0%}"
    )
    mend = "more memory, a shorter retention, or fewer dead letters"
    enough = 2 * max(used, limit)  # half of it is free then, also if far more is stored than the limit allows
    if limit and 4 * enough < 3 * seen.number("total_system_memory"):
        how = "twice what is stored or allowed now"
        mend = f"CONFIG SET maxmemory {enough}   ({how}; then CONFIG REWRITE; or {mend})"
    if share >= 0.95:
        yield Check("memory", "critical", f"{what}: new claims and triggers fail, or soon will", mend)
    elif share >= 0.8:
        yield Check("memory", "warning", what, mend)
    else:
        yield Check("memory", "ok", what)


def _format_bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count = round(count / 1024)
    return f"{count:,} {unit}"


def _persistence(seen: Seen) -> Iterator[Check]:
    fsync, snapshots = seen.setting("appendfsync", "everysec"), seen.setting("save")
    if seen.number("aof_enabled") and seen.config is None:
        yield Check("persistence", "ok", "append-only file; no permission for CONFIG, so the fsync policy is unknown")
        return
    if seen.number("aof_enabled"):
        lost = {"always": "a crash loses nothing", "everysec": "a crash of the machine loses up to about 2 s"}
        if fsync in lost:
            yield Check("persistence", "ok", f"append-only file, fsync {fsync}: {lost[fsync]}")
        else:
            what = f"append-only file, fsync {fsync}: a crash of the machine loses up to 30 s and more"
            yield Check("persistence", "warning", what, _config_command("appendfsync", "everysec"))
        return
    mend = _config_command("appendonly", "yes")
    if seen.config is None:
        what = "no append-only file, and no permission for CONFIG: a crash loses all writes since the last snapshot"
        yield Check("persistence", "warning", what, mend)
    elif not snapshots:
        what = "none: a restart loses all messages and records, so completed work may run again"
        yield Check("persistence", "critical", what, mend)
    else:
        seconds = max(int(word) for word in snapshots.split()[::2])
        what = f"snapshots only: a crash loses up to {seconds:,} s of accepted claims and messages"
        yield Check("persistence", "warning", what, mend)


def _disk(seen: Seen) -> Iterator[Check]:
    if seen.info.get("aof_last_write_status", "ok") != "ok":
        yield Check("disk", "critical", "the append-only file cannot be written", "check the server's log and disk")
    elif seen.info.get("rdb_last_bgsave_status", "ok") != "ok":
        stops = seen.setting("stop-writes-on-bgsave-error", "yes") == "yes"
        what = "the last snapshot failed" + (", so every write fails" if stops else "")
        yield Check("disk", "critical" if stops else "warning", what, "check the server's log and disk")


def _replicas(seen: Seen) -> Iterator[Check]:
    count = seen.number("connected_slaves")
    if not count:
        return
    needed = seen.setting("min-replicas-to-write", "0")
    if needed == "0" and seen.config is not None:
        what = f"{count}, none required for a write: an isolated primary accepts writes that a failover loses"
        yield Check("replicas", "warning", what, _config_command("min-replicas-to-write", "1"))
    else:
        yield Check("replicas", "ok", f"{count}, {needed} required for a write")


def _cluster(seen: Seen) -> Iterator[Check]:
    if seen.number("cluster_enabled") and not seen.in_cluster:
        what = "the server is a node of a cluster, and the URL is that of a single server"
        yield Check("cluster", "critical", what, "redis+cluster://host:port instead of redis://host:port")
        return
    if seen.in_cluster and not seen.cluster:
        yield Check("cluster", "skipped", "no permission for CLUSTER INFO")
    if not seen.cluster:
        return
    state, assigned = seen.cluster.get("cluster_state", "?"), seen.cluster.get("cluster_slots_assigned", "?")
    failing = int(seen.cluster.get("cluster_slots_pfail", 0)) + int(seen.cluster.get("cluster_slots_fail", 0))
    what = f"state {state}, {assigned} of 16384 slots assigned, {failing} failing"
    if state != "ok" or assigned != "16384":
        yield Check("cluster", "critical", what, "redis-cli --cluster fix host:port")
    elif failing:
        yield Check("cluster", "warning", what, "redis-cli --cluster check host:port")
    else:
        yield Check("cluster", "ok", what)


def _clock(seen: Seen) -> Iterator[Check]:
    if seen.apart is None:
        yield Check("clock", "skipped", "no permission for TIME")
        return
    mend = "run an NTP client on both machines, and let it slew instead of step"
    if abs(seen.jumped) > JUMP:
        what = f"the server's clock jumped by {seen.jumped:+.1f} s during the checks: leases may expire early"
        yield Check("clock", "critical", what, mend)
    elif abs(seen.apart) > APART:
        what = f"the server is {abs(seen.apart):.1f} s {'ahead' if seen.apart > 0 else 'behind'}: at= means its time"
        yield Check("clock", "warning", what, mend)
    else:
        yield Check("clock", "ok", f"{round(seen.apart * 1000):+d} ms from the client's, steady")


def _clients(seen: Seen) -> Iterator[Check]:
    there, most = seen.number("connected_clients"), seen.number("maxclients")
    if most and there >= 0.9 * most:
        what = f"{there:,} of {most:,} connections are taken"
        yield Check("connections", "warning", what, _config_command("maxclients", str(2 * most)))


def durable(policies: Collection[str]) -> Check:
    """Check the durability of a successful write.

    Args:
        policies: the `appendfsync` settings of the servers if the gate requires a sync.
    """
    if "everysec" not in policies:
        return Check("durability", "ok", "a write reaches the required durability")
    what = "WAITAOF succeeds, but some servers with `appendfsync everysec` answer before the sync"
    return Check("durability", "warning", what, _config_command("appendfsync", "always"))


def notifications(flags: str | None) -> Check:
    """Check the notifications for a gate that subscribes to expired keys.

    Args:
        flags: the server's `notify-keyspace-events`; None without permission to read it.
    """
    if flags is None:
        return Check("expiry", "skipped", "no permission to read notify-keyspace-events")
    if missing(flags):
        what = f"gate.on_expired is used, and the server does not publish expired keys (flags {flags!r})"
        return Check("expiry", "warning", what, _config_command("notify-keyspace-events", add_event_flags(flags)))
    return Check("expiry", "ok", "the server publishes expired keys")
