"""A call that the access list refuses has written nothing, whichever of its commands is missing."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from idemgate.cli.acl_rules import rule, user_name
from idemgate.core.calls import Call
from idemgate.errors import ServerRejected
from idemgate.lua import commands, names
from idemgate.testing import Clock
from tests.conftest import PASSWORD, Face
from tests.security.test_acl import Scene, dumped, restored, stored

FEW = {
    "topics/trigger",
    "topics/settle_and_take",
    "topics/take",
    "guard/complete",
    "dedup/add",
    "subscribers/lists/take",
    "subscribers/lists/settle",
}
"""The most frequent scripts, and some of which a part was written: for `tools/mutation`."""


@pytest.fixture
def scene(gate: Gate) -> Scene:
    return Scene(gate)


def kept(raw: Any, namespace: str) -> dict[bytes, tuple[Any, int]]:
    """What each key holds, and for how many minutes. A DUMP would show how the server orders the fields of a hash."""
    return {key: (value, round(raw.pttl(key) / 60_000)) for key, value in stored(raw, namespace).items()}


@pytest.mark.servers("7.0")  # Redis before 7.0 checks no command beforehand
@pytest.mark.damages("changing")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scripts", ["few", "all"])
@pytest.mark.slow
async def test_a_call_that_lacks_one_command_has_written_nothing(
    scripts: str, scene: Scene, raw: Any, url: str, namespace: str, clock: Clock
) -> None:
    # Given something everywhere, and a user that may do everything
    saved = dumped(raw, namespace)
    user, (scheme, _, place) = user_name(["admin"], namespace), url.partition("://")
    words = rule(["admin"], namespace, user, keys=[f"theirs-{namespace}*", f"{{theirs-{namespace}*"])
    raw.execute_command(*words, f">{PASSWORD}")
    seen, wrong = set[str](), list[str]()
    with Gate(f"{scheme}://{user}:{PASSWORD}@{place}", namespace=namespace, clock=clock, timeout="30s") as theirs:
        faces = [Face(theirs, False), Face(theirs, True)]
        chosen = [call for call in scene.calls if scripts == "all" or call.script.name in FEW]
        for call in chosen:
            for command in sorted(commands(call.script.name)):
                # When it loses one command while its connections are open, and makes any call
                raw.execute_command("ACL", "SETUSER", user, f"-{command.lower()}")
                for face in faces:
                    restored(raw, namespace, saved)
                    before = kept(raw, namespace)
                    refusal = await refused(face, call)
                    if not refusal:
                        continue
                    # Then what is refused has changed nothing, and the error names the access list. A restored stream
                    # has no group, which also is an answer.
                    seen.add(call.script.name)
                    if "access list" not in refusal and "NOGROUP" not in refusal:
                        wrong.append(f"{call.script.name} without {command}: {refusal}")
                    if kept(raw, namespace) != before:
                        wrong.append(f"{call.script.name} without {command}")
                raw.execute_command("ACL", "SETUSER", user, f"+{command.lower()}")
        await theirs.aio.close()
    raw.acl_deluser(user)
    assert wrong == []
    # And every script was refused something, where there is more than reading
    assert seen >= (FEW if scripts == "few" else {*names()})


async def refused(face: Face, call: Call[Any]) -> str:
    """The text of the refusal, or "" if the call was not refused."""
    context = face.gate.context
    try:
        if face.awaiting:
            await context.aio_link.run(call)
        else:
            context.link.run(call)
    except ServerRejected as error:
        return str(error)
    return ""
