"""Examine the servers of a store and a namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from idemgate.audit.server import Check, diagnose, durable, notifications
from idemgate.core import keys
from idemgate.core.calls import call, new_id
from idemgate.core.keys import check_name
from idemgate.errors import ServerRejected, StoreError
from idemgate.guard.claim_calls import Claims
from idemgate.operate.servers import read_server, read_settings
from idemgate.store.context import url_to_open
from idemgate.store.durability import Durability, DurabilityOption, parse_durability
from idemgate.store.endpoint import Endpoint
from idemgate.store.nodes import Server, servers
from idemgate.store.sync import SyncLink
from idemgate.store.tls import check_tls_files
from idemgate.store.url import endpoint_from_url

__all__ = ["Namespace", "ServerCheck", "examine_store"]

ServerCheck = tuple[str, Check]
"""The name of a server, or "" for the namespace, and a check of it."""
BATCHES = 100
"""The most batches of SCAN, of 1,000 keys each, that are searched for other layouts."""
SCOPE = "idemgate.doctor"
TRIED = 0.5
"""Seconds for which a call is tried."""
SYNCED = 3.0
"""Seconds for which a call that waits for a sync is tried: `everysec` syncs once a second, later on a busy disk."""


class Namespace:
    """The namespace to examine, and the durability of its gates; raise InvalidArgument for invalid values."""

    def __init__(self, url: str, name: str, durability: DurabilityOption = None) -> None:
        self.name: str = check_name(name, "namespace")
        self.durability: Durability | None = parse_durability(durability, name)
        self.url: str = url_to_open(url)
        self.endpoint: Endpoint = endpoint_from_url(self.url)
        check_tls_files(self.endpoint.settings)


def examine_store(where: Namespace, *, writes: bool = True) -> list[ServerCheck]:
    """Check each server, then the namespace.

    Args:
        where: the namespace.
        writes: True tries to write, too.

    Raises:
        StoreUnavailable: a server cannot be reached.
        ServerRejected: a server rejected a command.
    """
    with servers(where.endpoint) as found:
        checks = [
            (server.name, check)
            for server in found
            for check in diagnose(read_server(server, in_cluster=where.endpoint.kind == "cluster"))
        ]
        strange, listens = _check_namespace(where, found)
        checks += [("", check) for check in (*_check_permissions(where, writes), *_durable(where, found), strange)]
        if listens:
            checks += [(server.name, notifications(_flags(server))) for server in found]
    return checks


def _flags(server: Server) -> str | None:
    found = read_settings(server, "notify-keyspace-events")
    return None if found is None else found.get("notify-keyspace-events", "")


def _check_permissions(where: Namespace, writes: bool) -> Iterator[Check]:
    """Check the permissions of this connection with scripts, on a record of the doctor and on an empty slot."""
    link = SyncLink(where.endpoint, 5.0)
    claims, slot = Claims(where.name, None), keys.slot(where.name, SCOPE, 0, 1)
    key = claims.key(SCOPE, new_id().hex())
    tried: dict[str, Callable[[], object]] = {
        "run scripts that read": lambda: link.run(claims.inspect(key), TRIED),
        "run scripts that write": lambda: link.run(claims.mark(key, new_id(), 1000), TRIED),
        "read a topic": lambda: link.run(call("topics/stats", slot, (b"",), lambda reply: reply), TRIED),
        "publish a hint": lambda: link.command("PUBLISH", key[0], b""),
    }
    if not writes:
        del tried["run scripts that write"], tried["publish a hint"]
    refused: defaultdict[str, list[str]] = defaultdict(list)
    try:
        for what, attempt in tried.items():
            try:
                attempt()
            except StoreError as error:
                refused[str(error)].append(what)
    finally:
        link.close()
    if not refused:
        what = "read, write and publish in this namespace" if writes else "read this namespace; writing was not tried"
        yield Check("permissions", "ok", f"scripts may {what}")
    for why, found in refused.items():
        what = ", ".join(found)
        if any(word in why for word in ("NOPERM", "permission", "can't run", "can't access")):
            yield Check("permissions", "critical", f"this connection may not {what}: {why}", _grant_fix(where))
        elif any(word in why for word in ("password", "NOAUTH", "uthentication")):
            yield Check(
                "login", "critical", why, "the user and the password in the URL: redis://user:password@host:6379/0"
            )
        else:
            yield Check("calls", "critical", f"this connection cannot {what}: {why}", "see the lines above")


def _durable(where: Namespace, found: Sequence[Server]) -> Iterator[Check]:
    """Check that a write reaches the durability of the gates, on a record of the doctor."""
    if where.durability is None:
        return
    link, claims = SyncLink(where.endpoint, 5.0, where.durability), Claims(where.name, None)
    try:
        within = TRIED if where.durability.replicas else SYNCED
        link.run(claims.mark(claims.key(SCOPE, new_id().hex()), new_id(), 1000), within)
    except StoreError as error:
        yield Check("durability", "critical", str(error), "what the line above needs, or another durability=")
    else:
        policies = [] if where.durability.replicas else [read_settings(server, "appendfsync") or {} for server in found]
        yield durable([one.get("appendfsync", "") for one in policies])
    finally:
        link.close()


def _grant_fix(where: Namespace) -> str:
    what = (
        f"give it the roles it is for: idemgate acl ROLE --namespace {where.name} | redis-cli (which: idemgate acl -h)"
    )
    return f"{what}; or, if it is only to look: idemgate doctor --read-only"


def _check_namespace(where: Namespace, found: list[Server]) -> tuple[Check, bool]:
    try:
        return _scan_namespace(where, found)
    except ServerRejected:
        what = "its keys may not be listed (SCAN): other layouts, and clients that listen to expiry are not known"
        return Check("namespace", "skipped", what), False


def _scan_namespace(where: Namespace, found: list[Server]) -> tuple[Check, bool]:
    """Find keys of another layout with a bounded scan, and check for listeners to expiring keys."""
    strange: list[str] = []
    looked, whole, listens = 0, True, False
    for server in found:
        for number, batch in enumerate(server.scan(keys.pattern(where.name), 1000)):
            owners = {key: keys.owner_of(where.name, key) for key in batch}
            looked += len(batch)
            strange += [key.decode(errors="replace") for key, owner in owners.items() if owner.kind == "layout"]
            listens = listens or any(one.kind == "once" and one.name.startswith("expiry.") for one in owners.values())
            if number + 1 >= BATCHES:
                whole = False
                break
    seen = f"{looked:,} keys{'' if whole else ', not all of them'}"
    if strange:
        what = f"{seen}; {len(strange):,} of another layout, such as {strange[0]}"
        mend = "let one version of idemgate use a namespace; delete what an older one left"
        return Check("namespace", "warning", what, mend), listens
    return Check("namespace", "ok", seen if looked else "nothing in it: is that its name? (--namespace)"), listens
