"""Tenants: what one did is never given to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate, KeyReused
from idemgate.errors import ServerRejected
from idemgate.testing import Clock
from tests.claims import claims_of


async def test_two_namespaces_share_nothing(url: str, clock: Clock, namespace: str) -> None:
    # Given two gates on one server that differ in their namespace alone, which begins alike
    with (
        Gate(url, namespace=f"{namespace}-a", clock=clock) as a,
        Gate(url, namespace=f"{namespace}-a.b", clock=clock) as b,
    ):
        ran: list[str] = []
        one = a.once(key="{k}", scope="s", cache_size=100)(lambda k: ran.append("a") or f"secret of a: {k}")
        two = b.once(key="{k}", scope="s", cache_size=100)(lambda k: ran.append("b") or f"secret of b: {k}")
        # When both are asked the same, Then each runs its own and gets its own result
        assert [one("k"), two("k"), one("k"), two("k")] == ["secret of a: k", "secret of b: k"] * 2
        assert ran == ["a", "b"]
        # And neither sees, changes or takes what is the other's
        a.topic("t").trigger("k", "of a")
        assert b.topic("t").take(10) == []
        assert b.topic("t").stats().pending == 0
        assert b.forget("k", scope="s")
        assert a.inspect("k", scope="s").state == "done"


async def test_scopes_of_one_gate_share_nothing(face: Any) -> None:
    answers = [
        await face.once(key="{k}", scope=scope)(lambda k, scope=scope: f"secret of {scope}")("k")
        for scope in ("a", "b", "a:b", "a%3Ab", "b")
    ]
    assert answers == ["secret of a", "secret of b", "secret of a:b", "secret of a%3Ab", "secret of b"]


async def test_what_one_factory_makes_shares_a_scope_unless_that_is_named(face: Any) -> None:
    # Given functions that differ in what they close over alone
    def charge_of(tenant: str, **options: Any) -> Any:
        return face.once(**{"key": "{k}", "scope": "charge", **options})(lambda k: f"secret of {tenant}")

    # When both are asked the same, Then they are one function
    assert [await charge_of(tenant)("k") for tenant in ("a", "b")] == ["secret of a"] * 2
    # And with a scope each they are two
    assert [await charge_of(tenant, scope=tenant)("k") for tenant in ("a", "b")] == ["secret of a", "secret of b"]


async def test_a_key_that_names_its_tenant_is_that_tenants(face: Any) -> None:
    # Given one function for all tenants, whose key names the tenant
    guarded = face.once(key="{tenant}:{k}", scope="s")(lambda tenant, k: f"secret of {tenant}")
    # When tenants try to name each other's keys, Then each gets its own
    for tenant, k in (("a", "b:c"), ("a:b", "c"), ("a", "b%3Ac"), ("a%3Ab", "c"), ("", "a:b:c")):
        if tenant:
            assert await guarded(tenant, k) == f"secret of {tenant}"


async def test_a_fingerprint_that_names_its_tenant_discloses_nothing(face: Any) -> None:
    # Given a key that does not name the tenant, and a fingerprint that does
    guarded = face.once(key="{k}", scope="s", fingerprint=["tenant"])(lambda tenant, k: f"secret of {tenant}")
    assert await guarded("a", "k") == "secret of a"
    # When another tenant uses the same key, Then it is refused, and told nothing
    with pytest.raises(KeyReused) as refused:
        await guarded("b", "k")
    assert "secret" not in str(refused.value) + repr(vars(refused.value))


async def test_tenants_with_users_of_their_own_cannot_reach_each_other(
    users: Callable[..., str], namespace: str, clock: Clock, raw: Any
) -> None:
    # Given two tenants, each with a user and a namespace, one of which begins as the other
    names = [f"{namespace}-a", f"{namespace}-a.b"]
    urls = [users("producer", "guard", tenant=name) for name in names]
    for url, own, other in ((urls[0], *names), (urls[1], *reversed(names))):
        with Gate(url, namespace=own, clock=clock) as gate, Gate(url, namespace=other, clock=clock) as thief:
            # When each works in its own, Then it may
            assert gate.first("k", "1h")
            assert gate.topic("t").trigger("k").accepted
            # And in the other's it may do nothing
            acts = [
                lambda thief=thief: thief.inspect("k", scope="first"), lambda thief=thief: thief.first("new", "1h"),
                lambda thief=thief: thief.topic("t").peek("k"), lambda thief=thief: thief.topic("t").trigger("k"),
                lambda thief=thief: thief.context.link.command("PUBLISH", claims_of(thief).key("first", "k")[0], "x"),
            ]  # fmt: skip
            for act in acts:
                with pytest.raises(ServerRejected, match="this user's access list"):
                    await asyncio.to_thread(act)
