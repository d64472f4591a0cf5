"""Results of deliveries: a caller that triggered gets what the handler of its delivery returned."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import integers, lists, sampled_from

from idemgate import Delivery, Gate, InvalidArgument, Receipt
from idemgate.core import keys
from idemgate.errors import DeliveryFailed, NoResult, PolicyChanged, ResultTimeout, UnexpectedData
from idemgate.testing import Clock
from idemgate.topics import results


async def _take(topic: Any) -> Any:
    (delivery,) = await topic.take(1)
    return delivery


async def test_all_merged_callers_get_one_result(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="1s", merge="append", result_retention="10m")
    receipts = [await topic.trigger("k", n) for n in range(3)]
    other = await topic.trigger("other", 9)
    clock.advance("1s")
    for delivery in await topic.take(2):
        await topic.ack(delivery, result={"sum": sum(delivery.payload)})
    assert [await topic.result(receipt, 0) for receipt in receipts] == [{"sum": 3}] * 3
    assert await topic.result(other, 0) == {"sum": 9}
    counters = (await topic.stats()).counters
    assert (counters["acked"], counters["acked_triggers"]) == (2, 4)


@pytest.mark.parametrize("many", [False, True])
async def test_an_ack_with_unfinished_work_in_its_result_is_refused(face: Any, many: bool) -> None:
    topic = face.topic("t", result_retention="10m")
    await topic.trigger("k", 1)
    delivery = await _take(topic)
    pending = Future[None]()
    with pytest.raises(InvalidArgument, match=r"result\[0\].*Future"):
        await topic.ack([delivery] if many else delivery, result=[pending])
    # Then nothing was written: the delivery can be acknowledged, with what the work returns
    assert not pending.cancelled()
    assert await topic.ack(delivery, result="done") == "ok"


async def test_a_trigger_during_a_delivery_waits_for_the_next_one(face: Any) -> None:
    topic = face.topic("t", result_retention="10m")
    first = await topic.trigger("k", 1)
    delivery = await _take(topic)
    # Accepted within the same millisecond as the first trigger: the clock of the test stands still
    second = await topic.trigger("k", 2)
    await topic.ack(delivery, result="first")
    assert await topic.result(first, 0) == "first"
    with pytest.raises(ResultTimeout, match="no result for 'k' within 0 s"):
        await topic.result(second, 0)
    await topic.ack(await _take(topic), result="second")
    assert (await topic.result(first, 0), await topic.result(second, 0)) == ("first", "second")


async def test_a_retried_delivery_has_the_result_of_its_last_attempt(face: Any, clock: Clock) -> None:
    topic = face.topic("t", result_retention="10m", backoff="1s")
    first = await topic.trigger("k", 1)
    delivery = await _take(topic)
    second = await topic.trigger("k", 2)  # merges into the retry
    await topic.nack(delivery)
    with pytest.raises(ResultTimeout):
        await topic.result(first, 0)
    clock.advance("1s")
    await topic.ack(await _take(topic), result="both")
    assert [await topic.result(receipt, 0) for receipt in (first, second)] == ["both", "both"]


async def test_a_dead_letter_is_a_failure_until_it_was_redriven(face: Any) -> None:
    topic = face.topic("t", result_retention="10m")
    receipt = await topic.trigger("k", 1)
    await topic.bury(await _take(topic), reason="ValueError: no such order")
    with pytest.raises(DeliveryFailed, match="ValueError: no such order") as failed:
        await topic.result(receipt, 0)
    assert (failed.value.topic, failed.value.key) == ("t", "k")
    await topic.dead.redrive()
    await topic.ack(await _take(topic), result="mended")
    assert await topic.result(receipt, 0) == "mended"


async def test_a_redriven_dead_letter_that_merges_with_newer_triggers_has_their_result(face: Any, clock: Clock) -> None:
    topic = face.topic("t", merge="append", result_retention="10m")
    first = await topic.trigger("k", 1)
    await topic.bury(await _take(topic), reason="ValueError")
    clock.advance("1s")
    between = await topic.trigger("k", 2)
    await topic.ack(await _take(topic), result="between")
    clock.advance("1s")
    newest = await topic.trigger("k", 3)
    await topic.dead.redrive()
    await topic.ack(await _take(topic), result="merged")
    results = [await topic.result(receipt, 0) for receipt in (first, between, newest)]
    assert results == ["merged", "between", "merged"]


async def test_a_lease_that_lapsed_too_often_is_a_failure(face: Any, clock: Clock) -> None:
    topic = face.topic("t", result_retention="10m", max_attempts=1, lease="1s")
    receipt = await topic.trigger("k", 1)
    await _take(topic)
    clock.advance("2s")
    await topic.take(1)
    with pytest.raises(DeliveryFailed, match="lease lapsed"):
        await topic.result(receipt, 0)


@pytest.mark.parametrize("stored", [b"\x91\x09", b"\x91\x92\x00\xa1x", b"\x09", b"\xc1"], ids=repr)
async def test_a_foreign_list_of_results_does_not_prevent_an_ack(face: Any, raw: Any, stored: bytes) -> None:
    # Given something else in the place of the results of a key
    topic = face.topic("t", result_retention="10m")
    await topic.trigger("k", 1)
    await topic.ack(await _take(topic), result="first")
    receipt = await topic.trigger("k", 2)
    delivery = await _take(topic)
    (page,) = raw.scan_iter(f"*{face.gate.namespace}*:results*")
    raw.hset(page, b"kk", stored)
    # Then the delivery is acked, and its result is stored
    await topic.ack(delivery, result="second")
    assert await topic.result(receipt, 0) == "second"


async def test_a_receipt_of_another_topic_is_refused(face: Any) -> None:
    # Given two topics with a delivery of the same key each, and one without results
    prices = face.topic("prices", result_retention="10m")
    reports = face.topic("reports", result_retention="10m")
    plain = face.topic("plain")
    receipt = await prices.trigger("k", 1)
    await reports.trigger("k", 2)
    await reports.ack(await _take(reports), result="of reports")
    # When a caller passes the receipt to another topic, then no result of that topic is returned
    for other in (reports, plain):
        with pytest.raises(InvalidArgument, match="a receipt of topic 'prices'"):
            await other.result(receipt, 0)


async def test_a_topic_that_stores_no_results_any_more_refuses_a_receipt(face: Any) -> None:
    receipt = await face.topic("t", result_retention="10m").trigger("k", 1)
    redefined = face.topic("t", revision=1)
    with pytest.raises(InvalidArgument, match="topic 't' stores no results"):
        await redefined.result(receipt, 0)


async def test_a_cancelled_trigger_has_no_result(face: Any, clock: Clock) -> None:
    topic = face.topic("t", result_retention="10m", backoff="1s")
    receipt = await topic.trigger("k", 1)
    await topic.cancel("k")
    with pytest.raises(NoResult, match="it was cancelled"):
        await topic.result(receipt, 0)
    # A later message of the key did not carry it
    clock.advance("1s")
    await topic.trigger("k", 2)
    await topic.ack(await _take(topic), result="another")
    with pytest.raises(NoResult, match="it was cancelled"):
        await topic.result(receipt, 0)
    # Nor has one that was cancelled in flight and then failed
    running = await topic.trigger("k", 3)
    delivery = await _take(topic)
    await topic.cancel("k")
    await topic.nack(delivery)
    with pytest.raises(NoResult, match="it was cancelled"):
        await topic.result(running, 0)


async def test_a_message_that_was_buried_unstarted_has_failed(face: Any) -> None:
    topic = face.topic("t", result_retention="10m", backoff="1s")
    running = await topic.trigger("k", 1)
    delivery = await _take(topic)
    behind = await topic.trigger("k", 2)
    # When the message behind a delivery is buried
    assert await topic.bury("k", reason="poison") == "buried"
    # Then only its caller hears of it
    with pytest.raises(DeliveryFailed, match="poison"):
        await topic.result(behind, 0)
    await topic.ack(delivery, result="done")
    assert await topic.result(running, 0) == "done"
    with pytest.raises(DeliveryFailed, match="poison"):
        await topic.result(behind, 0)


async def test_a_trigger_that_was_not_accepted_has_no_result(face: Any) -> None:
    topic = face.topic("t", result_retention="10m")
    await topic.trigger("k", 1, event_id="e", version=2)
    for options, status in (({"event_id": "e"}, "duplicate"), ({"version": 1}, "dropped")):
        receipt = await topic.trigger("k", 1, **options)
        with pytest.raises(NoResult, match=rf"the trigger was not accepted \({status}\)"):
            await topic.result(receipt, 0)


async def test_each_of_many_triggers_has_a_result(face: Any) -> None:
    topic = face.topic("t", result_retention="10m", slots=4)
    receipts = await topic.trigger_many([(n % 50, n) for n in range(300)])
    while deliveries := await topic.take(100):
        for delivery in deliveries:
            await topic.ack(delivery, result=delivery.payload)
    assert [await topic.result(receipt, 0) for receipt in receipts] == [250 + n % 50 for n in range(300)]


async def test_a_result_is_kept_for_its_retention(face: Any, clock: Clock) -> None:
    topic = face.topic("t", result_retention="10s")
    receipt = await topic.trigger("k", 1)
    await topic.ack(await _take(topic), result="old")
    clock.advance("10s")
    assert await topic.result(receipt, 0) == "old"
    clock.advance("10s")
    with pytest.raises(ResultTimeout):
        await topic.result(receipt, 0)
    later = await topic.trigger("k", 2)
    await topic.ack(await _take(topic), result="new")
    assert await topic.result(later, 0) == "new"


async def test_only_the_newest_results_of_a_key_are_kept(face: Any, clock: Clock, raw: Any, namespace: str) -> None:
    topic = face.topic("t", result_retention="10m")
    receipts = []
    for n in range(20):
        receipts.append(await topic.trigger("k", n))
        await topic.ack(await _take(topic), result="x" * 60_000 if n < 5 else n)
        clock.advance("1ms")
        assert all(raw.hstrlen(key, "kk") < 140_000 for key in raw.keys(f"*{namespace}*results?"))
    assert [await topic.result(receipt, 0) for receipt in receipts[12:]] == list(range(12, 20))
    with pytest.raises(ResultTimeout):
        await topic.result(receipts[11], 0)


async def test_a_receipt_may_be_sent_to_another_process(face: Any) -> None:
    topic = face.topic("t", result_retention="10m")
    receipt = pickle.loads(pickle.dumps(await topic.trigger("k", 1)))
    await topic.ack(await _take(topic), result=[1, (2, 3)])
    assert await topic.result(receipt, 0) == [1, (2, 3)]


async def test_a_result_survives_a_change_of_the_slots_that_comes_before_the_delivery(face: Any, clock: Clock) -> None:
    topic = face.topic("t", result_retention="10m", slots=1)
    receipts = [await topic.trigger(n, n) for n in range(20)]
    await topic.reshard(4)
    while deliveries := await topic.take(20):
        for delivery in deliveries:
            await topic.ack(delivery, result=delivery.payload * 2)
    assert [await topic.result(receipt, 0) for receipt in receipts] == [2 * n for n in range(20)]


async def test_a_waiter_is_woken_across_a_change_of_the_slots(
    face: Any, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a caller that waits for a result, and does not poll
    monkeypatch.setattr(results, "_POLL", 3600.0)
    topic = face.topic("t", slots=2, result_retention="1h")
    receipt = await topic.trigger("k", 1)
    waiting = asyncio.create_task(topic.result(receipt, "90s"))
    channel = keys.result_channel(face.gate.namespace, "t", b"k")
    async with asyncio.timeout(60):
        while not raw.pubsub_numsub(channel)[0][1]:
            await asyncio.sleep(0.002)
        # When the delivery ends after the number of slots was changed
        await topic.reshard(16)
        delivery = await _take(topic)
        await topic.ack(delivery, result="made")
        # Then the caller is woken
        assert await waiting == "made"


async def test_bad_arguments_write_nothing(face: Any, everything: Any) -> None:
    topic, plain = face.topic("t", result_retention="10m"), face.topic("plain")
    receipt, without = await topic.trigger("k", 1), await plain.trigger("k", 1)
    delivery, other = await _take(topic), await _take(plain)
    before = everything()
    with pytest.raises(InvalidArgument, match="not a receipt"):
        await topic.result("k", 0)
    with pytest.raises(InvalidArgument, match=r'stores no results\. Declare the topic with result_retention="10m"'):
        await plain.result(without, 0)
    with pytest.raises(InvalidArgument, match="timeout"):
        await topic.result(receipt, -1)
    with pytest.raises(InvalidArgument, match="result"):
        await topic.ack(delivery, result=object())
    with pytest.raises(InvalidArgument, match="stores no results"):
        await plain.ack(other, result=1)
    with pytest.raises(InvalidArgument, match="result_retention"):
        face.gate.topic("u", result_retention=0)
    with pytest.raises(InvalidArgument, match="forwarded messages have no results"):
        face.gate.topic("u", result_retention="1m").forward("list")
    assert everything() == before


def test_the_retention_belongs_to_the_stored_policy(gate: Gate, entry: str, clock: Clock) -> None:
    gate.topic("t", result_retention="10m").trigger("k", 1)
    with Gate(entry, namespace=gate.namespace, clock=clock) as other, pytest.raises(PolicyChanged, match="result_ret"):
        other.topic("t", result_retention="5m").trigger("k", 1)
    with Gate(entry, namespace=gate.namespace, clock=clock) as other:
        # A program that declares nothing adopts it
        topic = other.topic("t")
        receipt = topic.trigger("k", 2)
        topic.ack(topic.take(), result="both")
        assert topic.result(receipt, 0) == "both"


@pytest.mark.damages("wrong-type")
async def test_results_of_another_type_are_refused_before_anything_is_written(
    face: Any, raw: Any, everything: Any
) -> None:
    topic = face.topic("t", result_retention="10m")
    receipt = await topic.trigger("k", 1)
    delivery = await _take(topic)
    calls = face.gate.topic("t").open()
    for key in calls.result_keys(0):
        raw.set(key, "mine")
        before = everything()
        with pytest.raises(UnexpectedData, match="holds a string, expected a hash"):
            await topic.ack(delivery, result=1)
        with pytest.raises(UnexpectedData, match="holds a string, expected a hash"):
            await topic.result(receipt, 0)
        assert everything() == before
        raw.delete(key)


async def test_a_waiter_is_woken(face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a caller that learns of the end by its wake-up only
    monkeypatch.setattr(results, "_POLL", 3600.0)
    topic = face.topic("t", result_retention="10m")
    receipt = await topic.trigger("k", 1)
    waiting = asyncio.create_task(topic.result(receipt, "60s"))
    while not waiting.done():
        await asyncio.sleep(0.05)
        for delivery in await topic.take(1):
            await topic.ack(delivery, result="done")
    assert await waiting == "done"


class ResultMachine(RuleBasedStateMachine):
    """Each payload lists the triggers that it carries. A delivery's result is its payload.

    So the result of a trigger must list this trigger. Other results of the key must never be returned for it. With
    `deaths` messages die and are redriven, and no two triggers have the same time: that is the documented limit.
    """

    gate: Gate
    clock: Clock
    deaths: bool

    def __init__(self) -> None:
        super().__init__()
        self.topic = self.gate.topic(
            f"t{next(_NUMBERS)}", merge="append", result_retention="1h", backoff=0, slots=2,
            max_attempts=3 if self.deaths else 1000,
        )  # fmt: skip
        self.receipts: list[tuple[int, Receipt]] = []
        self.ended: dict[int, str] = {}
        self.flying: list[Delivery[Any]] = []

    @rule(key=sampled_from("ab"), group=sampled_from([None, "g"]), delay=sampled_from([None, 0, 1]))
    def trigger(self, key: str, group: str | None, delay: int | None) -> None:
        number = len(self.receipts)
        self.receipts.append((number, self.topic.trigger(key, number, group=group, delay=delay)))
        self._pass_time()

    @rule(keys=lists(sampled_from("ab"), max_size=5))
    def trigger_many(self, keys: list[str]) -> None:
        first = len(self.receipts)
        receipts = self.topic.trigger_many([(key, first + n) for n, key in enumerate(keys)])
        self.receipts += [(first + n, receipt) for n, receipt in enumerate(receipts)]
        self._pass_time()

    def _pass_time(self) -> None:
        if self.deaths:
            self.clock.advance("1ms")

    @rule(ms=sampled_from([0, 1, 1000]))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms / 1000)

    @rule()
    def take(self) -> None:
        self.flying += self.topic.take(4)

    @precondition(lambda self: self.flying)
    @rule(which=integers(0, 9), verb=sampled_from(["ack", "ack", "nack", "bury", "release"]))
    def settle(self, which: int, verb: str) -> None:
        delivery = self.flying.pop(which % len(self.flying))
        verb = "nack" if verb == "bury" and not self.deaths else verb
        if verb == "ack":
            outcome = self.topic.ack(delivery, result=delivery.payload)
        else:
            outcome = getattr(self.topic, verb)(delivery)
        ends = {"dead": "dead", "cancelled": "cancelled"} | ({"ok": "done"} if verb == "ack" else {})
        if outcome in ends:
            self.ended |= dict.fromkeys(delivery.payload, ends[outcome])

    @rule(key=sampled_from("ab"), group=sampled_from([None, "g"]))
    def cancel(self, key: str, group: str | None) -> None:
        pending = self.topic.peek(key, group=group).pending
        self.topic.cancel(key, group=group)
        if pending is not None:
            self.ended |= dict.fromkeys(pending.payload, "cancelled")

    @rule()
    def redrive(self) -> None:
        revived = [number for letter in self.topic.dead.list(1000) for number in letter.payload]
        self.topic.dead.redrive()
        self.ended = {number: end for number, end in self.ended.items() if number not in revived}

    @invariant()
    def each_trigger_has_its_own_result(self) -> None:
        for number, receipt in self.receipts[-12:]:
            end = self.ended.get(number)
            try:
                result = self.topic.result(receipt, 0)
            except ResultTimeout:
                assert end is None or self._is_old(number)
            except DeliveryFailed:
                assert end in (None, "dead")  # None: redriven, and not handled yet
            except NoResult:
                assert end == "cancelled"
            else:
                assert number in result
                assert end == "done"

    def _is_old(self, number: int) -> bool:
        """Eight later results of the key may have replaced the result."""
        return sum(later in self.ended for later, _ in self.receipts if later > number) >= 7


_NUMBERS = itertools.count()


@pytest.mark.parametrize("deaths", [False, True])
def test_a_result_is_never_that_of_another_delivery(gate: Gate, clock: Clock, deaths: bool) -> None:
    steps = settings(
        max_examples=15,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
    )
    machine = type("Machine", (ResultMachine,), {"gate": gate, "clock": clock, "deaths": deaths})
    run_state_machine_as_test(machine, settings=steps)
