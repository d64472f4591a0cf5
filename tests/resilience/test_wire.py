"""Every script call of the guard and of topics while what is between client and server fails, through both links.

A call is made on two stages that are alike. On one of them it is disturbed: its reply is lost, cut, or its connection
reset; its request is lost, doubled, swallowed, or runs once more when everybody has moved on. The link asks again by
itself. Then the caller must have heard the same answer as on the quiet stage, and the two stages must look the same.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core.calls import Call
from idemgate.lua import names
from idemgate.store import clients, sync
from idemgate.store import connection_aio as line
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.resilience.casts import PLAYS, Play, answer_of

SCRIPT = b"EVALSHA"
LINKS = ("blocking", "awaiting")

FAULTS: dict[str, Callable[[Proxy], None]] = {
    "reply lost": lambda proxy: proxy.cut_reply(SCRIPT),
    "reply lost thrice": lambda proxy: proxy.cut_reply(SCRIPT, times=3),
    "connection reset instead of a reply": lambda proxy: proxy.reset_reply(SCRIPT),
    "request lost": lambda proxy: proxy.drop_request(SCRIPT),
    "request executed twice": lambda proxy: proxy.double_request(SCRIPT),
    "request swallowed by a silent connection": lambda proxy: proxy.swallow_request(SCRIPT),
}


def chosen(fault: str, link: str, n: int) -> Iterator[str]:
    """Plays for a fault and a link: at least n of them, in whole rounds; of a small suite a part, so that each play is
    met by one fault a link, and by another one with the other link."""
    if n < len(PLAYS) // len(FAULTS):
        first = (list(FAULTS).index(fault) + LINKS.index(link)) % len(FAULTS)
        return itertools.islice(PLAYS, first, None, len(FAULTS))
    return itertools.islice(itertools.cycle(PLAYS), -(-n // len(PLAYS)) * len(PLAYS))


PLAIN = pytest.mark.damages("undecodable")
"""The results and notes of plays are any bytes, which no gate could decode: the scripts do not look into them."""


class Theatre:
    """Two stages of each play, on gates of one clock: a quiet one, and one behind a proxy.

    A call that loses a reply has to be sent again. With the gate's default time-out a busy machine could use up the
    deadline before the second try; a minute leaves the answer to the link alone.
    """

    def __init__(self, url: str, namespace: str, proxy: Proxy) -> None:
        self.url, self.namespace, self.proxy = url, namespace, proxy
        self.numbers = itertools.count()
        self.link = "blocking"

    def opened(self, name: str, url: str, clock: Clock) -> tuple[Gate, Play]:
        gate = Gate(url, namespace=f"{self.namespace}-{next(self.numbers)}", clock=clock, timeout="60s")
        return gate, PLAYS[name](gate, clock)

    async def both(self, name: str) -> tuple[tuple[Gate, Play], tuple[Gate, Play]]:
        """Alike: each was set up at the same times."""
        start = 1_700_000_000.0
        quiet, disturbed = Clock(start), Clock(start)
        return (
            await asyncio.to_thread(self.opened, name, self.url, quiet),
            await asyncio.to_thread(self.opened, name, self.proxy.url, disturbed),
        )

    async def ask(self, gate: Gate, call: Call[Any]) -> Any:
        if self.link == "awaiting":
            return answer_of(await gate.aio.context.aio_link.run(call))
        return answer_of(await asyncio.to_thread(gate.context.link.run, call))


async def closed(*gates: Gate) -> None:
    for gate in gates:
        await gate.aio.close()
        gate.close()


@pytest.fixture
def theatre(url: str, namespace: str, raw: Any) -> Iterator[Theatre]:
    with Proxy(url) as proxy:
        made = Theatre(url, namespace, proxy)
        yield made
    for key in raw.scan_iter(f"*{namespace}-*", count=1000):
        raw.delete(key)


@PLAIN
@pytest.mark.timeout(0)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_answer_and_the_effect_are_those_of_an_undisturbed_call(
    theatre: Theatre,
    fault: str,
    link: str,
    many: Any,
    record_fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (clients, sync, line):  # or a silent connection would cost two seconds each
        monkeypatch.setattr(module, "SOCKET_TIMEOUT", 0.25)
    theatre.link, n = link, 0
    for name in chosen(fault, link, many(1)):
        # Given two stages that are alike
        (calm, told), (gate, play) = await theatre.both(name)
        expected = await theatre.ask(calm, told.call)
        # When the call is disturbed on one of them
        FAULTS[fault](theatre.proxy)
        answer = await theatre.ask(gate, play.call)
        theatre.proxy.heal()
        # Then it is answered as on the other, and both look the same
        assert answer == expected, name
        assert await asyncio.to_thread(play.facts) == await asyncio.to_thread(told.facts), name
        await closed(calm, gate)
        n += 1
    monkeypatch.undo()  # who audits waits as long as anybody
    record_fault(f"{fault}, of every call of guard and topic", n, promises="P6")


@PLAIN
@pytest.mark.timeout(0)
@pytest.mark.parametrize("link", LINKS)
async def test_a_reply_cut_at_any_byte_is_never_taken_for_another(
    theatre: Theatre, link: str, many: Any, record_fault: Any, drawn: random.Random, seed: int
) -> None:
    theatre.link, n, total = link, 0, 0
    for name in PLAYS:
        (calm, told), (gate, play) = await theatre.both(name)
        expected = await theatre.ask(calm, told.call)
        # Given a call that was answered, whose copies are answered the same
        assert await theatre.ask(gate, play.call) == expected
        length = theatre.proxy.replied
        total += length
        cuts = sorted(drawn.sample(range(length), min(length, many(2))))
        for at in cuts:
            # When the reply of a copy ends after that many bytes
            theatre.proxy.cut_reply_at(SCRIPT, at)
            # Then it is asked for again, and never read as it is
            assert await theatre.ask(gate, play.call) == expected, (name, at)
        theatre.proxy.heal()
        assert await asyncio.to_thread(play.facts) == await asyncio.to_thread(told.facts), name
        n += len(cuts)
        await closed(calm, gate)
    record_fault(
        "reply cut at a byte, of every call of guard and topic",
        n,
        promises="P6",
        exhaustive=n == total,
        seed=seed,
        wrong_answers=0,
    )


SAID_AGAIN = ("topic: extend", "once: renew")
"""A request of a lease's owner may arrive twice. The copy gets the end of the lease, and has no second effect."""
SET_BACK = ("once: claim", "once: claim_many")
"""A late copy bears the time of the test clock at which it was made: where another's lease began after that, the clock
looks set back, and the lease is made to end no later than it would. The server's own time does not go back so."""


@PLAIN
@pytest.mark.timeout(0)
@pytest.mark.parametrize("link", LINKS)
async def test_a_request_that_runs_after_its_caller_has_moved_on_changes_nothing(
    theatre: Theatre, link: str, many: Any, record_fault: Any, raw: Any
) -> None:
    theatre.link, n = link, 0
    names = [name for name in PLAYS if name not in SAID_AGAIN + SET_BACK]
    for name in itertools.islice(itertools.cycle(names), max(1, many(1) // len(names)) * len(names)):
        (calm, told), (gate, play) = await theatre.both(name)
        expected = await theatre.ask(calm, told.call)
        # Given a request that got stuck on its way, and was sent again
        theatre.proxy.hold_request(SCRIPT)
        assert await theatre.ask(gate, play.call) == expected, name
        # And that its caller, and others, went on
        for stage in (told, play):
            await asyncio.to_thread(stage.meanwhile)
        # When it arrives after all
        before = _dumped(raw, gate)
        assert await asyncio.to_thread(theatre.proxy.release) == 1
        # Then it changes nothing
        assert _dumped(raw, gate) == before, name
        assert await asyncio.to_thread(play.facts) == await asyncio.to_thread(told.facts), name
        await closed(calm, gate)
        n += 1
    fault = "request delayed until its caller has moved on, of every call of guard and topic but claims and heartbeats"
    record_fault(fault, n, promises="P5 P6")


def _dumped(raw: Any, gate: Gate) -> dict[bytes, bytes]:
    return {key: raw.dump(key) for key in sorted(raw.scan_iter(match=f"ig2:{{{gate.namespace}:*", count=1000))}


async def test_the_claim_of_a_caller_who_gave_up_lapses_and_is_counted(
    theatre: Theatre, record_fault: Any, many: Any
) -> None:
    n = many(5)
    for _ in range(n):
        (calm, _), (gate, play) = await theatre.both("once: claim")
        # Given a claim that got stuck, and whose caller gave up and went away
        theatre.proxy.hold_request(SCRIPT, times=1_000)
        with pytest.raises(Exception, match="no answer from the store"):
            await asyncio.to_thread(gate.context.link.run, play.call, 0.02)
        theatre.proxy.heal()
        # When it arrives after all
        assert theatre.proxy.release() > 0
        # Then nobody runs, for a lease; then another takes over, which is counted, under a higher token
        first = gate.claim("free", scope="s")
        assert not first.started
        gate.context.clock.advance("30s")
        then = gate.claim("free", scope="s")
        assert (then.started, then.taken_over) == (True, 1)
        await closed(calm, gate)
    record_fault("claim executed after its caller gave up: a lease is lost, and counted", n, promises="P1 P3 P5")


def test_every_script_is_on_a_stage(url: str, namespace: str) -> None:
    played = set()
    for number, build in enumerate(PLAYS.values()):
        with Gate(url, namespace=f"{namespace}-{number}", clock=(clock := Clock())) as gate:
            played.add(build(gate, clock).call.script.name)
    scripts = {name for name in names() if re.fullmatch("(guard|dedup|topics)/[a-z_]+", name)}
    assert scripts - played == {"topics/audit", "topics/registry"}
