"""The doctor on real servers, each with a configuration that is wrong in its own way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.audit.server import Check, Seen, diagnose, durable, notifications
from idemgate.cli import main
from idemgate.cli.acl_rules import rule
from idemgate.core import keys
from idemgate.operate import servers as reading
from idemgate.store.embedded.server import find_server
from idemgate.store.nodes import Server
from tests import cluster as servers
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)

SOUND = ("--appendonly", "yes", "--appendfsync", "everysec")
OLD = tuple(map(int, find_server().version.split(".")))[:2] < (7, 2)
Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[str, Any]]]:
    """`url, client = start("--appendonly", "yes")`: a new server."""
    with ExitStack() as stack:

        def start(*options: str) -> tuple[str, Any]:
            (port,) = servers.unused_ports(1)
            client = stack.enter_context(servers.server(tmp_path / str(port), port, *options))
            return f"redis://127.0.0.1:{port}/0", client

        yield start


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`code, told = doctor("--url", url)`: its exit code and its JSON."""

    def ask(*words: str) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return ask


def wrong(told: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in told["checks"] if one["state"] in ("warning", "critical")}


def test_a_sound_server_is_called_sound(start: Any, doctor: Doctor) -> None:
    url, client = start(*SOUND)
    code, told = doctor("--url", url, "--audit")
    assert (code, wrong(told), told["audit"]["sound"]) == (0, {}, True)
    assert {one["name"] for one in told["checks"]} == {
        "server", "eviction", "memory", "persistence", "clock", "permissions", "namespace",
    }  # fmt: skip
    # And the keys of the doctor expire
    assert all(client.pttl(key) > 0 for key in client.scan_iter())


WRONG: dict[str, tuple[tuple[str, ...], dict[str, str], int, str]] = {
    # name: options, what is found, exit code, a part of what mends it
    "eviction with a limit": (
        (*SOUND, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"),
        {"eviction": "critical"},
        1,
        "CONFIG SET maxmemory-policy noeviction ",
    ),
    "eviction without a limit": (
        (*SOUND, "--maxmemory-policy", "volatile-ttl"),
        {"eviction": "warning"},
        0,
        "CONFIG SET maxmemory-policy noeviction ",
    ),
    "nothing persistent": (("--appendonly", "no"), {"persistence": "critical"}, 1, "appendonly yes"),
    "snapshots only": (("--save", "3600", "1"), {"persistence": "warning"}, 0, "appendonly yes"),
    "never fsynced": (
        ("--appendonly", "yes", "--appendfsync", "no"),
        {"persistence": "warning"},
        0,
        "appendfsync everysec",
    ),
    # Less than a server takes for itself: Redis 6.2 0.8 MB.
    "memory nearly full": (
        (*SOUND, "--maxmemory", "100kb"),
        {"memory": "critical", "calls": "critical"},
        1,
        "more memory",
    ),
    "no listening to expiry": (SOUND, {"expiry": "warning"}, 0, "notify-keyspace-events"),
    "a node of a cluster": ((*SOUND, "--cluster-enabled", "yes"), {"cluster": "critical"}, 1, "redis+cluster://"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_with_what_mends_it(start: Any, doctor: Doctor, name: str) -> None:
    options, expected, code, mend = WRONG[name]
    url, client = start(*options)
    if "expiry" in expected:
        client.set(keys.record("default", "expiry.sessions", "x"), "x", ex=60)
    if "cluster" in expected:
        client.execute_command("CLUSTER ADDSLOTS", *range(servers.SLOTS))
        servers.wait_for(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    found, told = doctor("--url", url)
    assert (found, wrong(told)) == (code, expected)
    assert any(mend in one["mend"] for one in told["checks"] if one["name"] in expected)


def test_replicas_that_need_not_be_there_and_a_replica_itself(start: Any, doctor: Doctor) -> None:
    url, primary = start(*SOUND)
    at_replica, replica = start(*SOUND, "--replicaof", "127.0.0.1", url.rpartition(":")[2].partition("/")[0])
    servers.wait_for(lambda: replica.info("replication")["master_link_status"] == "up")
    servers.wait_for(lambda: primary.info("replication")["connected_slaves"] == 1)
    assert wrong(doctor("--url", url)[1]) == {"replicas": "warning"}
    primary.config_set("min-replicas-to-write", 1)
    assert wrong(doctor("--url", url)[1]) == {}
    code, told = doctor("--url", at_replica)
    assert code == 1
    assert wrong(told)["role"] == "critical"
    assert wrong(told)["calls"] == "critical"


def test_durability_that_gates_ask_for_is_tried(start: Any, doctor: Doctor) -> None:
    # Given a server that has no append-only file, or no WAITAOF, and no replica
    url, client = start()
    for asked, why in (("fsync", "needs Redis 7.2 or Valkey, `appendonly yes`"), ("2", "0 of 2 replicas")):
        code, told = doctor("--url", url, "--durability", asked)
        assert (code, wrong(told)["durability"]) == (1, "critical")
        assert any(why in one["what"] for one in told["checks"] if one["name"] == "durability"), asked
    # When there is one, and where nobody asks, it is well
    client.config_set("appendonly", "yes")
    assert "durability" not in wrong(doctor("--url", url)[1])
    client.config_set("appendfsync", "always")
    assert wrong(doctor("--url", url, "--durability", "fsync")[1]).get("durability") == ("critical" if OLD else None)
    # And "fsync" is no more than the policy where some servers answer for what they have yet to sync
    client.config_set("appendfsync", "everysec")
    assert wrong(doctor("--url", url, "--durability", "fsync")[1])["durability"] == ("critical" if OLD else "warning")


@pytest.mark.parametrize("asked", ["memory", "0", "-1", "1.5"])
def test_what_is_no_durability_is_refused(capsys: pytest.CaptureFixture[str], asked: str) -> None:
    assert main(["doctor", "--url", "redis://127.0.0.1:1", "--durability", asked]) == 2
    assert "durability" in capsys.readouterr().err


def test_what_a_user_may_not_is_said(start: Any, doctor: Doctor) -> None:
    url, client = start(*SOUND)
    tag = "ig2:{default:*"
    users = {
        "all": f"on nopass ~{tag} &{tag} +@all",
        "reader": f"on nopass ~{tag} &{tag} +@all -set -hset",
        "silent": f"on nopass ~{tag} +@all -publish",
        "elsewhere": "on nopass ~other:* &* +@all",
        "quiet": f"on nopass ~{tag} &{tag} +@all -config -info",
    }
    for name, rules in users.items():
        client.execute_command("ACL", "SETUSER", name, "resetchannels", *rules.split())  # Redis 6.2 gives all of them

    def refused(user: str) -> list[str]:
        told = doctor("--url", url.replace("//", f"//{user}:x@"))[1]
        found = [one["what"] for one in told["checks"] if one["name"] == "permissions" and one["state"] == "critical"]
        refused = [one.partition(": ")[0].removeprefix("this connection may not ") for one in found]
        return [what for one in refused for what in one.split(", ")]

    assert refused("all") == []
    assert refused("reader") == ["run scripts that write"]
    assert refused("silent") == ["publish a hint"]
    assert refused("elsewhere") == ["run scripts that read", "run scripts that write", "read a topic"]
    # And where the server may not be asked, the rest is looked at all the same
    code, told = doctor("--url", url.replace("//", "//quiet:x@"))
    assert refused("quiet") == []
    assert {one["name"]: one["state"] for one in told["checks"]}["server"] == "skipped"
    assert code == 0


def test_a_wrong_password_is_said_once(start: Any, doctor: Doctor) -> None:
    url, client = start(*SOUND)
    client.execute_command("ACL", "SETUSER", "eye", "on", ">secret", "+@all", "~*", "&*")
    code, told = doctor("--url", url.replace("//", "//eye:wrong@"))
    assert (code, wrong(told)) == (1, {"login": "critical"})
    assert "wrong" not in str(told)


def test_a_refused_login_is_said_with_the_audit_too(start: Any, doctor: Doctor) -> None:
    url, client = start(*SOUND)
    client.execute_command("ACL", "SETUSER", "eye", "on", ">secret", "+@all", "~*", "&*")
    code, told = doctor("--url", url.replace("//", "//eye:wrong@"), "--audit")
    assert (code, wrong(told)) == (1, {"login": "critical", "audit": "critical"})
    assert "audit" not in told


@pytest.mark.parametrize("more", [(), ("--audit",)])
def test_a_store_that_is_away_is_said_in_the_one_object(doctor: Doctor, more: tuple[str, ...]) -> None:
    code, told = doctor("--url", "redis://127.0.0.1:1/0", *more)
    assert (code, wrong(told)) == (1, {"store": "critical"} | ({"audit": "critical"} if more else {}))
    assert "no answer from the store" in told["checks"][-1]["what"]


def test_the_environment_names_the_namespace_too(
    start: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = start(*SOUND)
    monkeypatch.setenv("IDEMGATE_URL", url)
    monkeypatch.setenv("IDEMGATE_NAMESPACE", "shop")
    for words, says in (
        (["doctor"], "namespace shop"), (["topic", "ls"], "'shop'"), (["acl", "auditor"], "SETUSER shop-auditor"),
        (["doctor", "-n", "other"], "is that its name?"),
    ):  # fmt: skip
        assert main(words) == 0
        assert says in capsys.readouterr().out


def auditor(client: Any, **options: Any) -> None:
    """A user of that role, called "eye"."""
    client.execute_command(*rule(["auditor"], "default", "eye", **options))
    client.execute_command("ACL", "SETUSER", "eye", "nopass")


def test_a_user_who_only_looks_runs_all_of_it_and_nothing_is_written(start: Any, doctor: Doctor) -> None:
    url, client = start(*SOUND)
    with Gate(url) as gate:
        gate.topic("t", window="1h").trigger("k", 1)
        gate.first("k", "1h")
        gate.dedup("s", "1h").add("k")
    auditor(client)
    before = {key: client.dump(key) for key in client.scan_iter()}
    written = client.info()["rdb_changes_since_last_save"]
    asking = url.replace("//", "//eye:x@")
    # When a user with the access list of the role runs the doctor
    code, told = doctor("--url", asking, "--audit", "--read-only")
    # Then all is looked at that others look at, and nothing is changed, not for a moment
    assert (code, wrong(told), told["audit"]["sound"], told["audit"]["counted"]["pending"]) == (0, {}, True, 1)
    assert {one["name"]: one["state"] for one in told["checks"]} == dict.fromkeys(
        ["server", "eviction", "memory", "persistence", "clock", "permissions", "namespace"], "ok"
    )
    assert {key: client.dump(key) for key in client.scan_iter()} == before
    assert client.info()["rdb_changes_since_last_save"] == written
    # And without the word it is said that this user may not write, and what to do
    code, told = doctor("--url", asking)
    assert code == 1
    assert all("--read-only" in one["mend"] for one in told["checks"] if one["state"] == "critical")


def test_a_user_who_only_looks_sees_all_of_a_cluster(tmp_path: Path, doctor: Doctor) -> None:
    with servers.cluster(tmp_path) as ports:
        for port in ports:
            with redis.Redis(port=port) as client:
                auditor(client, cluster=True)
        with Gate(f"redis+cluster://127.0.0.1:{ports[0]}") as gate:
            gate.topic("t", slots=8).trigger_many([(f"k{n}", n) for n in range(30)])
        url = f"redis+cluster://eye:x@127.0.0.1:{ports[0]}"
        _, told = doctor("--url", url, "--audit", "--read-only")
        assert told["audit"]["sound"]
        assert told["audit"]["counted"]["pending"] == 30
        assert [one["state"] for one in told["checks"] if one["name"] == "cluster"] == ["ok"] * 3
        assert {*wrong(told)} == {"persistence"}  # these nodes keep nothing


def test_each_node_of_a_cluster_is_looked_at(tmp_path: Path, doctor: Doctor) -> None:
    with servers.cluster(tmp_path) as ports:
        url = f"redis+cluster://127.0.0.1:{ports[0]}"
        with Gate(url) as gate:
            gate.topic("t", slots=8).trigger_many([(f"k{n}", n) for n in range(30)])
            gate.first("k", "1h")
        code, told = doctor("--url", url, "--audit")
        assert {one["server"] for one in told["checks"] if one["server"]} == {f"127.0.0.1:{port}" for port in ports}
        assert [one["state"] for one in told["checks"] if one["name"] == "cluster"] == ["ok"] * 3
        assert (told["audit"]["sound"], told["audit"]["counted"]["pending"], told["audit"]["counted"]["records"]) == (
            True, 30, 1,
        )  # fmt: skip
        assert code == 1  # these nodes keep nothing
        assert {*wrong(told)} == {"persistence"}


def test_damage_and_other_layouts_are_shown(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, client = start(*SOUND)
    with Gate(url, namespace="shop") as gate:
        topic = gate.topic("orders", window="1h")
        topic.trigger_many([(f"k{n}", n) for n in range(8)])
        client.delete("ig2:{shop:topic:orders:0/1}:scheduled")
        gate.first("k", "1h")
        client.persist("ig2:{shop:once:first:k}")
    client.set("ig1:{shop:topics}", "x")
    # When it is shown as text
    assert main(["doctor", "--url", url, "--namespace", "shop", "--audit"]) == 1
    out = capsys.readouterr().out
    text = " ".join(out.split())
    # Then it says what, how it may have come, and what mends it; of many alike, a few
    assert "unplaced, 8 found" in text
    assert text.count("stands nowhere") == 5
    assert "and 3 more" in text
    assert "mend: PEXPIRE ig2:{shop:once:first:k} 86400000" in text
    assert "may come of:" in text
    assert "ig1:{shop:topics}" in text
    assert text.rstrip().endswith("9 critical, 2 warnings")
    # And what it says mends it
    lines = [line.strip().removeprefix("mend: ") for line in out.splitlines() if "mend: ZADD" in line]
    for line in lines:
        client.execute_command(*line.split())
    assert main(["doctor", "--url", url, "--namespace", "shop", "--audit"]) == 1
    assert "unplaced, 3 found" in capsys.readouterr().out


def test_a_command_line_that_is_wrong_is_2_and_a_store_that_is_away_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.delenv("IDEMGATE_URL", raising=False)
    assert main(["doctor"]) == 2
    assert "--url" in capsys.readouterr().err
    assert main(["doctor", "--url", url, "--namespace", "a b"]) == 2
    assert main(["doctor", "--url", "redis://127.0.0.1:1/0"]) == 1
    assert "no answer from the store" in capsys.readouterr().out
    monkeypatch.setenv("IDEMGATE_URL", url)
    assert main(["doctor", "--namespace", "nobody"]) in (0, 1)


# -- what no server at hand will say ----------------------------------------------------------------------------------

FINE = {"redis_version": "7.0.15", "aof_enabled": 1, "total_system_memory": 100, "used_memory": 10}
SAYINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing wrong": ({}, {}),
    "too old": ({"redis_version": "6.0.9"}, {"server": "critical"}),
    "a little too old": ({"redis_version": "6.1.999"}, {"server": "critical"}),
    "old enough": ({"redis_version": "6.2.0"}, {}),
    "Valkey, which calls itself Redis 7.2 too": ({"redis_version": "7.2.4", "valkey_version": "9.1.0"}, {}),
    "neither": ({"dragonfly_version": "1.2"}, {"server": "warning"}),
    "none of the two": ({"kvrocks_version": "1.2", "redis_version": "4.0"}, {"server": "warning"}),
    "a replica": ({"role": "slave", "master_host": "h", "master_port": 1}, {"role": "critical"}),
    "loading": ({"loading": 1}, {"role": "critical"}),
    "would drop keys": ({"maxmemory_policy": "allkeys-lru"}, {"eviction": "warning"}),
    "drops keys": ({"maxmemory_policy": "allkeys-lru", "maxmemory": 100}, {"eviction": "critical"}),
    "evicted": ({"evicted_keys": 3}, {"evicted": "critical"}),
    "not full": ({"used_memory": 79}, {}),
    "getting full": ({"used_memory": 80}, {"memory": "warning"}),
    "almost full": ({"used_memory": 94}, {"memory": "warning"}),
    "full": ({"used_memory": 95}, {"memory": "critical"}),
    "full, and of a machine that is not": ({"used_memory": 10, "maxmemory": 10}, {"memory": "critical"}),
    "a server that does not say": ({"total_system_memory": 0}, {"memory": "skipped"}),
    "a disk that is full": ({"aof_last_write_status": "err"}, {"disk": "critical"}),
    "a snapshot that failed": ({"rdb_last_bgsave_status": "err"}, {"disk": "critical"}),
    "enough connections": ({"connected_clients": 89, "maxclients": 100}, {}),
    "many connections": ({"connected_clients": 9, "maxclients": 10}, {"connections": "warning"}),
    "replicas that need not be there": ({"connected_slaves": 2}, {"replicas": "warning"}),
    "a node of a cluster": ({"cluster_enabled": 1}, {"cluster": "critical"}),
}
ALWAYS = ["server", "eviction", "memory", "persistence", "clock"]
"""What is said of every server, in this order."""


@for_each("name", SAYINGS)
def test_what_a_server_says_of_itself(name: str) -> None:
    info, expected = SAYINGS[name]
    found = diagnose(Seen(FINE | info, {"appendfsync": "always"}, 0.0, 0.0, False, {}))
    assert {one.name: one.state for one in found if one.state != "ok"} == expected
    assert [one.name for one in found if one.name in ALWAYS] == ALWAYS
    assert all(one.mend for one in found if one.state in ("warning", "critical"))


@pytest.mark.parametrize(("policies", "state", "mend"), [
    ((), "ok", ""),
    (("always",), "ok", ""),
    (("no",), "ok", ""),
    (("always", "everysec"), "warning", "CONFIG SET appendfsync always"),
])  # fmt: skip
def test_a_sync_each_second_is_warned_of_where_each_write_is_to_be_synced(
    policies: tuple[str, ...], state: str, mend: str
) -> None:
    found = durable(policies)
    assert (found.name, found.state) == ("durability", state)
    assert mend in found.mend


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str] | None, str, str]] = {
    "whatever is known": ({"aof_enabled": 1}, {}, "persistence", "ok"),
    "always": ({"aof_enabled": 1}, {"appendfsync": "always"}, "persistence", "ok"),
    "every second": ({"aof_enabled": 1}, {"appendfsync": "everysec"}, "persistence", "ok"),
    "some time": ({"aof_enabled": 1}, {"appendfsync": "no"}, "persistence", "warning"),
    "snapshots": ({"aof_enabled": 0}, {"save": "3600 1 300 100"}, "persistence", "warning"),
    "nothing": ({"aof_enabled": 0}, {"save": ""}, "persistence", "critical"),
    "may not be asked": ({"aof_enabled": 0}, None, "persistence", "warning"),
    "goes on": ({"rdb_last_bgsave_status": "err"}, {"stop-writes-on-bgsave-error": "no"}, "disk", "warning"),
    "one must be there": ({"connected_slaves": 1}, {"min-replicas-to-write": "1"}, "replicas", "ok"),
    "none must be there": ({"connected_slaves": 1}, {"min-replicas-to-write": "0"}, "replicas", "warning"),
    "replicas that may not be asked about": ({"connected_slaves": 1}, None, "replicas", "ok"),
}


@for_each("name", SETTINGS)
def test_how_a_server_is_set(name: str) -> None:
    info, config, check, state = SETTINGS[name]
    found = diagnose(Seen(FINE | info, config, 0.0, 0.0, False, {}))
    (one,) = [one for one in found if one.name == check]
    assert one.state == state
    assert one.mend or state == "ok"


def test_how_much_snapshots_forget_and_how_large_a_memory_is() -> None:
    info = FINE | {"aof_enabled": 0, "used_memory": 3 * 1024**3 // 2, "maxmemory": 3000 * 1024**3}
    said = {one.name: one.what for one in diagnose(Seen(info, {"save": "300 100 3600 1"}, 0.0, 0.0, False, {}))}
    assert "up to 3,600 s" in said["persistence"]
    assert said["memory"] == "2 GiB of 3,000 GiB, 0%"
    small = diagnose(Seen(FINE | {"used_memory": 1023, "maxmemory": 10240}, {}, 0.0, 0.0, False, {}))
    assert {one.name: one.what for one in small}["memory"] == "1,023 B of 10 KiB, 10%"
    some = diagnose(Seen(FINE | {"used_memory": 3 * 1024**2, "maxmemory": 1024**3}, {}, 0.0, 0.0, False, {}))
    assert {one.name: one.what for one in some}["memory"] == "3 MiB of 1 GiB, 0%"


def test_a_server_that_may_not_be_asked_is_skipped_but_for_its_clock() -> None:
    found = diagnose(Seen({}, None, None, 0.0, False, {}))
    assert [(one.name, one.state) for one in found] == [("server", "skipped"), ("clock", "skipped")]
    late = diagnose(Seen({}, None, 60.0, 0.0, False, {}))
    assert [(one.name, one.state) for one in late] == [("server", "skipped"), ("clock", "warning")]


@pytest.mark.parametrize(("flags", "state"), [(None, "skipped"), ("", "warning"), ("KE", "warning"), ("AKE", "ok")])
def test_whether_a_server_tells_of_keys_that_expire(flags: str | None, state: str) -> None:
    found = notifications(flags)
    assert (found.name, found.state) == ("expiry", state)
    assert found.mend.startswith("CONFIG SET notify-keyspace-events ") is (state == "warning")


@for_each(
    ("apart", "jumped", "state"),
    [
        (0.0, 0.0, "ok"),
        (5.0, -0.5, "ok"),
        (5.1, 0.5, "warning"),
        (-6.0, 0.0, "warning"),
        (0.0, 0.51, "critical"),
        (60.0, -1.0, "critical"),
    ],
)
def test_clocks(apart: float, jumped: float, state: str) -> None:
    found = diagnose(Seen(FINE, {}, apart, jumped, False, {}))
    assert [one.state for one in found if one.name == "clock"] == [state]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"cluster_state": "ok", "cluster_slots_assigned": "16384"}, "ok"),
        ({"cluster_state": "ok", "cluster_slots_assigned": "16384", "cluster_slots_pfail": "5"}, "warning"),
        (
            {
                "cluster_state": "ok",
                "cluster_slots_assigned": "16384",
                "cluster_slots_pfail": "5",
                "cluster_slots_fail": "5",
            },
            "warning",
        ),
        ({"cluster_state": "ok", "cluster_slots_assigned": "16383"}, "critical"),
        ({"cluster_state": "fail", "cluster_slots_assigned": "16384"}, "critical"),
    ],
)
def test_what_a_cluster_says_of_itself(said: dict[str, str], state: str) -> None:
    found: list[Check] = diagnose(Seen(FINE | {"cluster_enabled": 1}, {}, 0.0, 0.0, True, said))
    assert [one.state for one in found if one.name == "cluster"] == [state]


@pytest.mark.parametrize(("setting", "refused"), [("yes", True), ("no", False)])
def test_a_failed_snapshot_says_whether_writes_are_refused(setting: str, refused: bool) -> None:
    info = FINE | {"rdb_last_bgsave_status": "err"}
    seen = Seen(info, {"stop-writes-on-bgsave-error": setting}, 0.0, 0.0, False, {})
    (disk,) = [one for one in diagnose(seen) if one.name == "disk"]
    assert ("every write fails" in disk.what) is refused
    assert disk.state == ("critical" if refused else "warning")


@for_each(
    ("version", "state"),
    [("6.2.0", "ok"), ("6.1.99", "critical"), ("6.2", "ok"), ("6.2-rc1", "ok"), ("10.0", "ok"), ("?", "critical")],
)
def test_a_version_is_read_however_it_ends(version: str, state: str) -> None:
    found = diagnose(Seen(FINE | {"redis_version": version}, {}, 0.0, 0.0, False, {}))
    assert {one.name: one.state for one in found}["server"] == state


@pytest.mark.parametrize("delays", [(0.01, 9.0), (9.0, 0.01)])
@pytest.mark.parametrize("moved", [0.0, 60.0, -60.0])
def test_an_answer_that_comes_late_is_no_jump_of_a_clock(
    monkeypatch: pytest.MonkeyPatch, delays: tuple[float, float], moved: float
) -> None:
    late, now, theirs = iter(delays), [1000.0], [0.0]

    class Busy(Server):
        def __init__(self) -> None: ...

        def command(self, *_: str) -> Any:
            answer = now[0] + theirs[0]
            now[0] += next(late)
            theirs[0] = moved  # between both answers
            return int(answer), round(answer % 1 * 1_000_000)

    monkeypatch.setattr(reading, "monotonic", lambda: now[0])
    monkeypatch.setattr(reading, "time", SimpleNamespace(time=lambda: now[0], sleep=lambda _: None))
    apart, jumped = reading._read_clocks(Busy(), 0.0)
    assert (apart, jumped) == (0.0, pytest.approx(moved, abs=10 if moved else 0))
