"""The catalogue of findings: what may be wrong with the data, the servers and what runs, with its cause and its repair.

The audit, the doctor and `idemgate status` name what they find by the kinds of this table. Programs read the names.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from idemgate.core.activity import OFTEN

__all__ = ["CATALOGUE", "DATA_KINDS", "RUNNING_KINDS", "SERVER_KINDS", "SNAPSHOT_KINDS", "Kind", "Severity", "link_of"]

Severity = Literal["critical", "warning"]


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        severity: "critical" if it breaks a promise or stops work, else "warning".
        cause: the likely cause.
        mend: the repair, unless the finding has a more specific one.
        threshold: the number from which on it is one; 0 if there is none.
        unit: the unit of that number.
    """

    severity: Severity
    cause: str
    mend: str
    threshold: float = 0
    unit: str = ""


_OTHERS = "another program or a person wrote to a key of idemgate"
_PARTLY = (
    "a write that bypassed the scripts, a restart that lost a part of the data, or a call that an access list refused"
    " after a part of its writes"
)
_BUG = "please report it with the finding: the scripts write both values together"
DATA_KINDS: dict[str, Kind] = {
    "conservation": Kind(
        "critical",
        f"messages were added or removed: {_PARTLY}",
        "repair the other findings first; compare with the sender's data, and trigger the missing messages again. After"
        " a refused call only the counters may differ",
    ),
    "orphan": Kind("critical", _PARTLY, "remove the orphaned entry"),
    "unplaced": Kind("critical", _PARTLY, "schedule it"),
    "misplaced": Kind("critical", _PARTLY, "remove the wrong entry"),
    "stuck": Kind(
        "critical",
        f"the end of a delivery did not schedule the waiting message: {_PARTLY}",
        "schedule it, or end a delivery of the group",
    ),
    "room": Kind(
        "warning",
        "group_concurrency was raised while messages waited",
        "nothing: they are scheduled when the next delivery of the group ends",
    ),
    "held": Kind(
        "critical", f"the group holds a key that never leaves it, or a key twice: {_PARTLY}", "remove it from the group"
    ),
    "overlap": Kind(
        "critical",
        f"group_concurrency was lowered while these ran; or {_PARTLY}",
        "wait for the deliveries to end, and audit again",
    ),
    "lease": Kind(
        "critical",
        _OTHERS,
        "end the lease now; for a delivery only if no worker handles it",
    ),
    "fence": Kind(
        "critical",
        f"{_PARTLY}; or a lossy failover. For a token far ahead: {_OTHERS}, or the clock was set back by days",
        "raise the slot's fence above every granted token; for a token far ahead find out who wrote it",
    ),
    "undecodable": Kind(
        "critical", f"{_OTHERS}, or a version that packs differently", "inspect it; delete it if no program can read it"
    ),
    "disagrees": Kind("critical", _PARTLY, _BUG),
    "wrong-slot": Kind(
        "critical",
        "the number of slots was changed without idemgate, or a key was renamed",
        "trigger it again, and delete this entry",
    ),
    "changing": Kind(
        "warning",
        "a command that reshards or deletes the topic is running, or was killed",
        "if none is running, start it again: idemgate topic reshard TOPIC N, or idemgate topic delete TOPIC",
    ),
    "closed": Kind(
        "critical",
        "a change of the number of slots was interrupted, and its registry entry was lost",
        "start the change again: idemgate topic reshard TOPIC N",
    ),
    "unregistered": Kind(
        "critical",
        "the registry was deleted, or lost an entry",
        "open the topic again with its policy, or delete the slot's keys",
    ),
    "no-expiry": Kind("critical", f"{_OTHERS} (PERSIST, SET)", "set an expiry"),
    "expires": Kind("critical", f"{_OTHERS} (EXPIRE)", "remove the expiry"),
    "forgotten-never": Kind("warning", _PARTLY, "remove the entry that never expires"),
    "foreign": Kind(
        "warning", _OTHERS, "use a separate namespace for each program; delete the key if it is not needed"
    ),
    "wrong-type": Kind("critical", _OTHERS, "rename or delete that key; until then every call to it fails"),
    "layout": Kind(
        "warning",
        f"a newer or older idemgate uses this namespace; for a slot without a layout: {_OTHERS}",
        "run a single version, or delete the keys of the other",
    ),
    "unread": Kind(
        "warning",
        "it is too large to read in one step, or was migrating to another node",
        "audit with a higher limit when the load is low",
    ),
    "fence-fell": Kind(
        "critical",
        "tokens were lost: a lossy failover, or a restart without an append-only file",
        "check the writes of the owner with the lower token: a fence may have rejected them",
    ),
    "ran-again": Kind(
        "critical",
        "the record of the completion was lost, or retention was shorter than the delay of the duplicate",
        "undo the second effect",
    ),
    "overlap-key": Kind(
        "critical",
        "a lease lapsed while its handler ran on, and it wrote no 'gone'; or promise P10 is broken",
        "let your database refuse stale owners: a fence, or a key stored with the effect",
    ),
    "overlap-group": Kind(
        "critical",
        "a lease lapsed while its handler ran on, and it wrote no 'gone'; or promise P10 is broken",
        "let your database refuse stale owners: a fence, or a key stored with the effect",
    ),
    "owner": Kind(
        "warning", "a member died between two writes", "nothing: the next heartbeat of a member releases the slot"
    ),
}
"""What an audit finds in the stored data and in histories."""

_SETTINGS = "a setting of the server"
SERVER_KINDS: dict[str, Kind] = {
    "server": Kind("critical", "idemgate was not tested with this server", "use Redis >= 6.2 or Valkey"),
    "role": Kind("critical", "the URL names another server than the primary, or it starts", "connect to the primary"),
    "eviction": Kind("critical", _SETTINGS, "set maxmemory-policy to noeviction"),
    "evicted": Kind(
        "critical",
        "the server removed keys to free memory",
        "switch eviction off, audit the data, and repair what that finds; then `CONFIG RESETSTAT` ends the finding",
    ),
    "memory": Kind("critical", "more data than memory", "more memory, a shorter retention, or fewer dead letters"),
    "persistence": Kind("critical", _SETTINGS, "switch the append-only file on"),
    "disk": Kind("critical", "the disk is full or fails", "check the server's log and disk"),
    "replicas": Kind("warning", _SETTINGS, "require a replica for each write"),
    "cluster": Kind("critical", "nodes of the cluster fail, or the URL names a single server", "repair the cluster"),
    "clock": Kind("critical", "the clock of a machine is not synchronized", "run an NTP client that slews"),
    "connections": Kind("warning", "programs open many connections", "raise maxclients, or close connections"),
    "permissions": Kind("critical", "the access list of the user", "give the user the roles that it needs"),
    "login": Kind("critical", "the user or the password is wrong", "correct the URL"),
    "calls": Kind("critical", "the server refuses calls: memory, a replica, the disk", "see the other findings"),
    "durability": Kind("critical", "the servers do not give what the gate asks for", "another durability="),
    "expiry": Kind("warning", _SETTINGS, "set notify-keyspace-events"),
    "namespace": Kind("warning", "several versions of idemgate use one namespace", "use one version for a namespace"),
    "store": Kind("critical", "no server answers", "a server that answers, and the URL and login for it"),
    "audit": Kind("critical", "no server answers", "a server that answers, and the URL and login for it"),
}
"""What the doctor checks of servers, and what it says about a namespace. A check may find less than its severity."""
RUNNING_KINDS: dict[str, Kind] = {
    "topic-unserved": Kind(
        "critical",
        "no process takes from the topic: the program with its handler does not run, or names the topic otherwise",
        "start the program that has the handler",
        30,
        "s",
    ),
    "handlers-hang": Kind(
        "critical",
        "handlers wait for something that does not answer, and hold all places",
        "restart these workers, and give the calls of the handler a timeout",
        60,
        "s",
    ),
    "ran-unguarded": Kind(
        "critical",
        "the store was unavailable, and on_store_error lets calls run without a guard",
        "check the store; look for work that ran twice",
        1,
        "calls in ten minutes",
    ),
    "topic-late": Kind(
        "warning",
        "triggers arrive faster than handlers end, or a limit of the topic holds messages back",
        "more workers, a higher limit, or a faster handler",
        60,
        "s",
    ),
    "topic-paused": Kind("warning", "a pause was not ended", "resume the topic", 300, "s"),
    "topic-abandoned": Kind(
        "warning",
        "the handler of the topic was removed or renamed, and the topic still holds messages or dead letters",
        "serve it again; or move what waits with `idemgate topic transfer`, export the dead letters that you need, and"
        " delete the topic",
        60,
        "s",
    ),
    "group-blocked": Kind(
        "warning",
        "a group gets more messages than it may handle at a time, or one of its handlers hangs",
        "raise group_concurrency, divide the group, or restart what hangs",
        60,
        "s",
    ),
    "poison-message": Kind(
        "warning",
        "the handler fails for this message each time",
        "mend the handler. Until then bury the message of a topic, and redrive it later; give the consumer of a broker"
        " max_attempts",
        OFTEN,
        "attempts",
    ),
    "dead-letters": Kind(
        "warning", "handlers gave up messages lately", "mend the handler, then redrive the dead letters", 600, "s"
    ),
    "messages-rejected": Kind(
        "warning",
        "consumers or subscribers gave up messages lately: they failed for the last time, or their key or body is"
        " wrong",
        "the log has them (consumer.rejected, subscriber.dead or subscriber.failed); mend the handler or the producer,"
        " then redrive the dead letters",
        1,
        "in ten minutes",
    ),
    "broker-unavailable": Kind(
        "warning",
        "a broker does not answer consumers, or refuses them: it delivers messages again",
        "check the broker, the network, and what the consumer may do",
        3,
        "failed requests in ten minutes",
    ),
    "payload-refused": Kind(
        "warning",
        "a producer sends payloads that the topic cannot merge or store",
        "correct the producer: its triggers are lost",
        600,
        "s",
    ),
    "process-clock": Kind(
        "warning",
        "the clock of a machine is wrong: at= and versions that are times mean something else there",
        "run an NTP client on that machine",
        5,
        "s",
    ),
    "version-ahead": Kind(
        "warning",
        "a producer whose clock is ahead sent this version, and triggers of the others are dropped as outdated",
        "reset the version, and synchronize the clock of that producer",
        60,
        "s",
    ),
    "key-held": Kind(
        "warning",
        "the owner of the key lost its lease, and whether its work is done is unknown",
        "find out whether the work is done, then `idemgate key resolve` with --done or --again",
    ),
    "calls-hang": Kind(
        "warning",
        "a guarded call or a handler waits for something that does not answer: its key waits for it, unless max_run has"
        " ended its lease",
        "restart the process, and give what hangs a timeout; if a guarded call may run that long, set its max_run",
        3600,
        "s",
    ),
    "leases-lost": Kind(
        "warning",
        "handlers run longer than their leases, or a process stalls",
        "choose a longer lease; look for stalls, such as code that holds the GIL",
        3,
        "in ten minutes",
    ),
    "deliveries-lapse": Kind(
        "warning",
        "workers die again and again, such as out of memory",
        "look for the reason in the logs of the machines",
        2,
        "times the places of a worker, in ten minutes",
    ),
    "store-unavailable": Kind(
        "warning",
        "processes cannot reach the store, or it answers slowly",
        "check the store and the network",
        1,
        "failed polls in a minute",
    ),
    "completion-lost": Kind(
        "warning",
        "work ran, and the store did not record that it is done: it may run again",
        "check the store; look for work that ran twice",
        1,
        "in ten minutes",
    ),
    "policy-outdated": Kind(
        "warning",
        "a program declares an older revision of a policy than the store has: a deployment is not complete",
        "deploy the program again",
        600,
        "s",
    ),
    "versions-differ": Kind(
        "warning", "a deployment is not complete", "deploy the program again where it is older", 600, "s"
    ),
}
"""What `idemgate status` finds in topics, keys and processes, besides "changing"."""
SNAPSHOT_KINDS = (
    "store", "server", "role", "eviction", "evicted", "memory", "persistence", "disk", "cluster", "clock",
    "connections", "changing", *RUNNING_KINDS,
)  # fmt: skip
"""The kinds that a snapshot shows, and so those of `idemgate status`, of metrics and of alert rules. "store" is that of
a snapshot that cannot be taken. The others need a scan, a write, or a comparison with a gate."""
CATALOGUE: dict[str, Kind] = DATA_KINDS | SERVER_KINDS | RUNNING_KINDS
"""All kinds of findings, by name."""


def link_of(kind: str) -> str:
    """Return the page and the heading that explain a kind."""
    if kind in SERVER_KINDS:
        return "docs/operations.md#check-the-server-with-the-doctor"
    return f"docs/findings.md#{kind}" if kind in RUNNING_KINDS else "docs/operations.md#repair-a-finding"
