"""Least privilege: what a role may do is enough for all that it is for, and none of it can be taken away."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.cli.acl_rules import ROLES, rule
from idemgate.cli.doctor.examine import Namespace, examine_store
from idemgate.errors import ServerRejected, StoreError
from idemgate.lua import Script, checked, names
from idemgate.store.embedded.server import find_server, start
from idemgate.testing import Clock
from tests import cluster as servers
from tests.claims import claims_of
from tests.conftest import PASSWORD
from tests.scripts.contracts import WRITES
from tests.security.scenes import BESIDE, SCENES, Stage
from tools.reliability import server_of

USER = "least"
WHOLE = int(find_server().version.partition(".")[0]) < 7
"""Before Redis 7.0 the log of refusals names whole commands: "config" for "config|get"."""
FRESH = ("reset", "resetchannels", "on", f">{PASSWORD}", "-@all", *(["+client|setinfo"] if WHOLE else []))
"""May nothing yet; `reset` alone leaves all channels on Redis 6.2. Where a refused `client|setinfo`, which clients do
without, could not be told from `client|setname`, it is allowed."""
_numbers = itertools.count()

NAMED: dict[str, dict[str, Any]] = {
    "worker": {"keys": ["THEIRS*"]},
    "subscriber": {"keys": ["THEIRS*"], "channels": ["THEIRS.*", "__keyevent@1__:*"]},
    "admin": {"keys": ["THEIRS*"]},
}
SPARE: dict[str, set[str]] = {}
"""Of a library that its scripts share with others; it reads what may be read by other commands, too."""
UNSEEN = {"+ping"}
"""Asked of connections that were idle for a while."""
ASKED_IN_VAIN = {("command", "client|setinfo"), ("command", "config" if WHOLE else "config|get")}
"""Clients and the doctor ask, and do without."""


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    """A server of this module: its log of refusals is read."""
    with start() as started:
        yield started.url


@pytest.fixture
def raw(own: str) -> Iterator[Any]:
    with redis.Redis.from_url(f"{own}?db=1") as client:
        client.config_set("notify-keyspace-events", "Egx")
        yield client
        client.flushall()


class Trial:
    """Scenes by users whose rule is what a test says."""

    def __init__(self, raw: Any, own: str, role: str) -> None:
        self.raw, self.own = raw, own
        # Placeholders, since each scene has names of its own.
        self.words = rule([role], "NS", USER, **NAMED.get(role, {}))[7:]

    def refused(self, scene: Callable[[Stage], None], without: str = "") -> set[tuple[str, str]]:
        """What the server refuses a user who may all but one thing, such as ("command", "get"). A scene that is refused
        nothing has to end well."""
        namespace, theirs = f"n{next(_numbers)}", f"theirs-{next(_numbers)}"
        beside = rule(BESIDE[scene], "NS", USER)[7:] if scene in BESIDE else []
        words = [word for word in (*self.words, *beside) if word != without]
        named = [word.replace("NS", namespace).replace("THEIRS", theirs) for word in words]
        self.raw.execute_command("ACL", "SETUSER", USER, *FRESH, *named)
        self.raw.script_flush()
        self.raw.acl_log_reset()
        failed = self._played(scene, namespace, theirs)
        self.raw.flushall()
        found = {(one["reason"], one["object"]) for one in self.raw.acl_log()}
        if isinstance(failed, ServerRejected) and found <= ASKED_IN_VAIN:
            return {("checked", str(failed))}  # a script asked beforehand, of which the log knows nothing
        if failed is not None and found <= ASKED_IN_VAIN:
            raise failed
        return found

    def _played(self, scene: Callable[[Stage], None], namespace: str, theirs: str) -> BaseException | None:
        clock, (scheme, place) = Clock(), self.own.split("://")
        url = f"{scheme}://{USER}:{PASSWORD}@{place}?db=1&client_name=least"
        with (
            Gate(url, namespace=namespace, clock=clock, timeout="30s") as mine,
            Gate(url, namespace=namespace, timeout="30s") as lasting,
            Gate(f"{self.own}?db=1", namespace=namespace, clock=clock) as other,
        ):
            try:
                scene(Stage(mine, lasting, url, other, clock, self.raw, theirs))
            except Exception as error:
                return error
        return None


TRACKING = """\
local server, first, known = redis, nil, { PUBLISH = true, TIME = true }
local writes = { WRITES }
local function track(command)
  if first and not known[command] then
    error("sends " .. command .. ", which may be refused, after " .. first)
  elseif writes[command] and command ~= "PUBLISH" then
    first = first or command
  end
  known[command] = true
end
local redis = { sha1hex = server.sha1hex, error_reply = server.error_reply, status_reply = server.status_reply }
function redis.acl_check_cmd(command)
  known[command] = true
  return true
end
function redis.call(command, ...)
  track(command)
  return server.call(command, ...)
end
function redis.pcall(command, ...)
  track(command)
  return server.pcall(command, ...)
end
""".replace("WRITES", ", ".join(f"{name} = true" for name in sorted(WRITES)))
"""Replaces `redis` in a script: it fails at a command that was neither asked for nor sent before the first write."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", [role for role in ROLES if role not in {"subscriber", "auditor"}])
def test_a_script_asks_for_what_it_sends_after_its_first_write(
    role: str, raw: Any, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given scripts that note what they ask for and what they send
    variants = {name: Script(name, TRACKING + checked.checked_script(name).text.decode()) for name in names()}
    monkeypatch.setattr(checked, "checked_script", variants.__getitem__)
    # When a user does all that the role is for, Then no command that may be refused follows a write
    trial = Trial(raw, own, role)
    for scene in SCENES[role]:
        assert trial.refused(scene) <= ASKED_IN_VAIN, scene


SHOWN = {word for role in ROLES if role != "admin" for word in rule([role], "NS", USER)}
"""What an admin may do as others may: shown of those."""


USUAL = {"guard", "viewer"}
"""The roles of the usual suite. The others take a second each, and are slow tests."""
LONG = {"subscriber"}
"""Its scenes wait for others at each word that is left out: minutes. `IDEMGATE_LEAST=1` says to run them too."""


@pytest.mark.timeout(900)  # a scene for each thing that a role may do
@pytest.mark.parametrize(
    "role",
    [
        pytest.param(role, marks=[] if role in USUAL else pytest.mark.slow)
        for role in ROLES if role not in LONG or "IDEMGATE_LEAST" in os.environ
    ],
)  # fmt: skip
def test_a_role_may_do_what_it_is_for_and_nothing_of_it_can_be_left_out(
    role: str, raw: Any, own: str, record_fault: Callable[..., None]
) -> None:
    trial = Trial(raw, own, role)
    # Given a user of the role, Then nothing of what it is for is refused
    usual = {scene: trial.refused(scene) for scene in SCENES[role]}
    assert {one for found in usual.values() for one in found} <= ASKED_IN_VAIN, usual
    # When it may do one thing less, Then something of that is refused
    left = [word for word in trial.words if role != "admin" or word not in SHOWN]
    unmissed = {word for word in left if not any(trial.refused(scene, word) - ASKED_IN_VAIN for scene in SCENES[role])}
    assert unmissed - UNSEEN == SPARE.get(role, set())
    fault = "a command, key or channel taken from the list of a role: something that it is for is refused"
    whole = "IDEMGATE_LEAST" in os.environ
    record_fault(fault, len(left), exhaustive=whole, server=server_of(own), not_missed=len(unmissed))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_on_a_cluster_a_role_needs_what_is_printed_for_one_and_nothing_of_it_can_be_left_out(tmp_path: Path) -> None:
    with servers.cluster(tmp_path) as ports:
        operator = servers.Operator(ports)

        def refused(without: str = "") -> set[tuple[str, str]]:
            """What the nodes refuse a user who may all but one thing, while the slot of a record moves."""
            namespace = f"n{next(_numbers)}"
            words = [word for word in rule(["guard", "auditor"], namespace, USER, cluster=True)[7:] if word != without]
            for node in operator.nodes:
                node.execute_command("ACL", "SETUSER", USER, *FRESH, *words)
                node.acl_log_reset()
            url = f"redis+cluster://{USER}:{PASSWORD}@127.0.0.1:{ports[0]}"
            with Gate(url, namespace=namespace, timeout="30s") as gate, suppress(StoreError):
                claim = gate.claim("k", lease="60s")
                for _ in operator.move(claims_of(gate).key("claim", "k")[0].decode()):
                    assert gate.claim("k").state == "in_progress"
                assert claim.complete(1)
                examine_store(Namespace(url, namespace), writes=False)
            return {(one["reason"], one["object"]) for node in operator.nodes for one in node.acl_log()}

        assert refused() <= ASKED_IN_VAIN
        alone = rule(["guard", "auditor"], "n", USER)
        for word in [word for word in rule(["guard", "auditor"], "n", USER, cluster=True) if word not in alone]:
            assert refused(word) - ASKED_IN_VAIN, word
        operator.close()
