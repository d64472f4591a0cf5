"""What is refused, and nothing written: bad input, other policies, foreign data. The error has value and fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import tenacity

from idemgate import Gate, InvalidArgument, Trigger, append, union
from idemgate.core.keys import PARTS
from idemgate.errors import DecodeError, PolicyChanged, UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.deliveries import Settlement
from idemgate.topics.merge import pack
from tests.conftest import Awaited
from tests.for_each import for_each
from tests.messages import pack_message

pytestmark = pytest.mark.one_in(5)

NAN = float("nan")
Dumps = Callable[[], dict[bytes, bytes]]


# -- bad input --------------------------------------------------------------------------------------------------------

POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"window": "60s", "quiet": "30s"}, r"quiet=30\.0: .*not both.* Drop one of window and quiet"),
    ({"window": 0}, r"window=0: is zero\. Pass at least"),
    ({"window": -5}, r"window=-5: is negative\. Pass"),
    ({"window": NAN}, r"window=nan: is not a finite number\. Pass seconds"),
    ({"window": float("inf")}, r"window=inf: is not a finite number\. Pass seconds"),
    ({"window": "1 minute"}, r"window='1 minute': is not a duration\. Pass seconds"),
    ({"window": True}, r"window=True: is not a duration\. Pass seconds"),
    ({"window": 0.0004}, r"window=0\.0004: is shorter than a millisecond\. Pass"),
    ({"window": 60_000 * 86_400}, r"window=5184000000: is longer than 100 years\. Numbers are seconds"),
    ({"quiet": "5s"}, r"quiet=5\.0: a key that is triggered more often .* is never delivered\. Add max_delay"),
    ({"quiet": "5s", "edge": "leading"}, r'quiet=5\.0: .* Add max_delay="1m" or max_size=100, or max_delay=None'),
    ({"quiet": timedelta(0)}, r"quiet=datetime.timedelta\(0\): is zero\. Pass"),
    ({"quiet": -1, "max_delay": 5}, r"quiet=-1: is negative\. Pass"),
    ({"quiet": 30, "max_delay": 20}, r"max_delay=20\.0: shorter than quiet \(30\.0 s\)\. Make it"),
    ({"window": 30, "max_delay": 60}, r"max_delay=60\.0: only bounds a quiet time\. Add quiet="),
    ({"max_size": 3}, r"max_size=3: there is no window to cut short\. Add window="),
    ({"window": 60, "max_size": 0}, r"max_size=0: not a positive whole number\. Use"),
    ({"window": 60, "max_size": 2.5}, r"max_size=2\.5: not a positive whole number\. Use"),
    ({"edge": "leading"}, r"edge='leading': there is no window .*\. Add window="),
    ({"edge": "both", "window": 60}, r"edge='both': no such edge\. Use"),
    ({"edge": "leading", "window": 60, "max_size": 2}, r"edge='leading': .*bound a trailing edge\. Drop them"),
    ({"edge": "leading", "quiet": 5, "max_delay": 60}, r"edge='leading': .*bound a trailing edge\. Drop them"),
    ({"slots": 3}, r"slots=3: not a power of two .*\. Use 1, 2, 4"),
    ({"slots": 0}, r"slots=0: not a power of two .*\. Use"),
    ({"slots": -2}, r"slots=-2: not a power of two .*\. Use"),
    ({"slots": 32_768}, r"slots=32768: not a power of two from 1 to 16,384\. Use"),
    ({"slots": 4.0}, r"slots=4\.0: not a power of two .*\. Use"),
    ({"lease": 0}, r"lease=0: is zero\. Pass"),
    ({"lease": "-1s"}, r"lease='-1s': is not a duration\. Pass"),
    ({"max_attempts": 0}, r"max_attempts=0: not a positive whole number\. Use"),
    ({"backoff": []}, r"backoff=\[\]: has no delays\. Pass"),
    ({"backoff": ["1s", -3]}, r"backoff\[1\]=-3: is negative\. Pass"),
    ({"backoff": NAN}, r"backoff=nan: is not a finite number\. Pass"),
    ({"dead_retention": 0}, r"dead_retention=0: is zero\. Pass"),
    ({"max_dead_letters": -1}, r"max_dead_letters=-1: not a positive whole number\. Use"),
    ({"dedup_retention": "soon"}, r"dedup_retention='soon': is not a duration\. Pass"),
    ({"merge": "newest"}, r"merge='newest': no such merge policy\. Use one of last, first"),
    ({"merge": {}}, r"merge=\{\}: not a merge policy\. Use"),
    ({"merge": 7}, r"merge=7: not a merge policy\. Use"),
    ({"merge": {"a": {"b": "sum"}}}, r"merge=.*itself one per field\. Only"),
    ({"merge": {"a": "newest"}}, r"merge='newest': no such merge policy\. Use"),
    ({"priority_boost": 0}, r"priority_boost=0: is zero\. Pass"),
    ({"group_concurrency": 0}, r"group_concurrency=0: not a positive whole number\. Use"),
    ({"concurrency": 2.5}, r"concurrency=2\.5: not a positive whole number\. Use"),
    ({"concurrency": 3, "slots": 4}, r"concurrency=3: less than the 4 slots.*\. Allow"),
    ({"rate": "often"}, r"rate='often': not a rate\. Use"),
    ({"rate": 0}, r"rate=0: out of range\. Use"),
    ({"burst": 3}, r"burst=3: there is no rate .*\. Add rate="),
    ({"merge": {7: "sum"}}, r"merge=7: a field's name is not a str\. Use"),
]


@for_each(("policy", "text"), POLICIES, ids=lambda value: "" if isinstance(value, dict) else value[:30])
def test_a_bad_policy_is_refused_at_once(gate: Gate, everything: Dumps, policy: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        gate.topic("t", **policy)
    assert everything() == {}


@for_each("name", ["", "a b", "a{b}", "a:b", "ü", "x" * 65, None, 7])
def test_a_bad_name_is_refused_at_once(gate: Gate, url: str, everything: Dumps, name: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^topic={re.escape(repr(name))}: not a name\. Use 1 to 64 of"):
        gate.topic(name)
    with pytest.raises(InvalidArgument, match=rf"^namespace={re.escape(repr(name))}: not a name\. Use 1 to 64 of"):
        Gate(url, namespace=name)
    assert everything() == {}


@for_each("make", [append, union])
@for_each("cap", [0, -1, 2.5, 100_001, True])
def test_a_bad_cap_is_refused(make: Callable[[Any], Any], cap: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^cap={cap}: not a number of items\. Use 1 to 100,000"):
        make(cap)


class Thing:
    """What no codec knows."""

    def __repr__(self) -> str:
        return "<a thing>"


TRIGGERS: list[tuple[Any, dict[str, Any], str]] = [
    ("last", {"key": ""}, r"key='': empty\. An empty key would"),
    ("last", {"key": b""}, r"key=b'': empty\. An empty key would"),
    ("last", {"key": None}, r"key=None: a NoneType is not a key\. Use a str, bytes or int"),
    ("last", {"key": 1.5}, r"key=1\.5: a float is not a key\. Use"),
    ("last", {"key": True}, r"key=True: a bool is not a key\. Use"),
    ("last", {"key": "\ud800"}, r"key='\\ud800': not valid Unicode .*\. Pass bytes"),
    ("last", {"key": "x" * 65_537}, r"key='xxx.*: 65537 bytes long\. Use at most"),
    ("last", {"payload": "x" * 262_144}, r"payload=<class 'str'>: takes 262,150 bytes; .* is 262,144\. Store it"),
    ("first", {"payload": b"x" * 262_144}, r"payload=<class 'bytes'>: takes 262,150 bytes; .*\. Store it"),
    ("append", {"payload": "x" * 262_144}, r"payload=<class 'str'>: takes 262,150 bytes; .*\. Store it"),
    ("union", {"payload": ["x" * 300 + str(n) for n in range(1000)]},
     r"payload=<class 'list'>: takes 3\d\d,\d\d\d bytes; .*\. Store it"),
    ({"a": "last"}, {"payload": dict.fromkeys("ab", "x" * 200_000)}, r"payload=<class 'dict'>: takes 400,\d\d\d "),
    ("last", {"payload": Thing()}, r"payload=<a thing>: "),
    ("last", {"payload": {"lines": [1, {2: Thing()}]}}, r"payload\['lines'\]\[1\]\[2\]=<a thing>: "),
    ("last", {"payload": datetime(2024, 1, 1)}, r"payload=datetime.*naive"),  # noqa: DTZ001
    ("append", {"payload": Thing()}, r"payload=<a thing>: "),
    ("union", {"payload": [Thing()]}, r"payload=<a thing>: "),
    ("union", {"payload": "abc"}, r"payload='abc': not a collection\. merge=\"union\" needs"),
    ("union", {"payload": {"a": 1}}, r"payload=\{'a': 1\}: not a collection\. "),
    ("sum", {"payload": "7"}, r"payload='7': not an int or float\. merge=\"sum\" needs numbers"),
    ("sum", {"payload": None}, r"payload=None: not an int or float\. "),
    ("sum", {"payload": True}, r"payload=True: not an int or float\. "),
    ("min", {"payload": [1]}, r"payload=\[1\]: not an int or float\. merge=\"min\" needs numbers"),
    ("max", {"payload": NAN}, r"payload=nan: not a number that merges exactly\. Use finite"),
    ("sum", {"payload": float("inf")}, r"payload=inf: not a number that merges exactly\. Use finite"),
    ("sum", {"payload": 2**53 + 1}, r"payload=9007199254740993: not a number that merges exactly\. Use"),
    ({"a": "sum"}, {"payload": 7}, r"payload=7: not a mapping\. A merge policy per field needs a dict"),
    ({"a": "sum"}, {"payload": {"a": "x"}}, r"payload\['a'\]='x': not an int or float\. "),
    ({"a": "sum"}, {"payload": {"b": Thing()}}, r"payload\['b'\]=<a thing>: "),
    ({"a": "sum"}, {"payload": {7: 1}}, r"payload=7: a field's name is not a str\. Use text"),
    ("last", {"delay": -1}, r"delay=-1: is negative\. Pass"),
    ("last", {"delay": NAN}, r"delay=nan: is not a finite number\. Pass"),
    ("last", {"delay": "tomorrow"}, r"delay='tomorrow': is not a duration\. Pass"),
    ("last", {"delay": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)}, r"delay=1: at= was given too\. Pass one of"),
    ("last", {"at": datetime(2030, 1, 1)}, r"at=datetime.*: is a naive datetime\. Give it a zone"),  # noqa: DTZ001
    ("last", {"at": 1_700_000_000}, r"at=1700000000: is not a datetime\. Pass an aware"),
    ("last", {"at": datetime(1969, 12, 31, tzinfo=UTC)}, r"at=datetime.*: lies before 1970\. Pass"),
    ("last", {"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))},
     r"at=datetime.*: lies after the year 9999 of UTC\. Pass"),
    ("last", {"version": "7"}, r"version='7': not an integer up to 2\*\*53\. Use"),
    ("last", {"version": 1.5}, r"version=1\.5: not an integer .*\. Use"),
    ("last", {"version": True}, r"version=True: not an integer .*\. Use"),
    ("last", {"version": 2**53 + 1}, r"version=9007199254740993: not an integer up to .*\. Use"),
    ("last", {"event_id": ""}, r"event_id='': empty\. "),
    ("last", {"event_id": 1.5}, r"event_id=1\.5: a float is not a key\. Use"),
]  # fmt: skip


@pytest.mark.parametrize("opened", [False, True], ids=["new", "opened"])
@for_each(("merge", "trigger", "text"), TRIGGERS, ids=lambda value: value[:30] if isinstance(value, str) else "")
async def test_a_bad_trigger_is_refused_before_anything_is_written(
    gate: Gate, everything: Dumps, merge: Any, trigger: dict[str, Any], text: str, opened: bool
) -> None:
    topic = gate.topic(f"t{len(gate.topics)}", merge=merge)
    if opened:
        topic.open()
    before = everything()
    arguments = {"key": "k"} | trigger
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        topic.trigger(**arguments)
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        await topic.aio.trigger(**arguments)
    after = everything()
    if opened and text.startswith("payload"):  # counted, and nothing else
        slot = f":topic:{topic.name}:0/1}}:".encode()
        counted = {key.partition(slot)[2]: after.pop(key) for key in [*after] if slot in key}
        assert counted[b"meta"] in ({b"v": b"3", b"refused_" + why: b"2"} for why in (b"payload", b"too_large"))
        assert {part.rstrip(b"01") for part in counted} == {b"meta", b"replies"}
    assert after == before
    assert bool(before) == opened


async def _later() -> AsyncIterator[tuple[str, int]]:
    yield "k", 1


NO_TRIGGERS: list[tuple[Any, str]] = [
    (None, "triggers=None: cannot be iterated over"),
    (7, "triggers=7: cannot be iterated over"),
    (Trigger("k", 1), r"triggers=Trigger\(.*: cannot be iterated over"),
    (_later(), "triggers=<async_generator .*: cannot be iterated over"),
    ("DE", "triggers='DE': one value, not many"),
    (b"DE", "triggers=b'DE': one value, not many"),
    (["DE"], "triggers='str': not a key and its payload"),
    ([b"DE"], "triggers='bytes': not a key and its payload"),
    ([{"key": "k", "payload": 1}], "triggers='dict': not a key and its payload"),
    ([["k", 1]], "triggers='list': not a key and its payload"),
    ([("k", 1, 2)], "triggers='tuple': not a key and its payload"),
    ([("k",)], "triggers='tuple': not a key and its payload"),
    ([None], "triggers='NoneType': not a key and its payload"),
    ([7], "triggers='int': not a key and its payload"),
]


@for_each(("triggers", "text"), NO_TRIGGERS, ids=range(len(NO_TRIGGERS)))
async def test_what_is_no_key_with_its_payload_is_never_taken_apart(
    face: Any, everything: Dumps, triggers: Any, text: str
) -> None:
    if isinstance(triggers, list):
        triggers = [("good", 1), *triggers]
    with pytest.raises(InvalidArgument, match=rf"^{text}\. Pass \(key, payload\) tuples"):
        await face.topic("t").trigger_many(triggers)
    assert everything() == {}


async def test_keys_are_checked_wherever_they_are_named(face: Any, everything: Dumps) -> None:
    topic = face.topic("t")
    for verb in (topic.cancel, topic.flush, topic.peek):
        with pytest.raises(InvalidArgument, match=r"^key='': empty"):
            await verb("")
    with pytest.raises(InvalidArgument, match=r"^key='': empty"):
        await topic.reschedule("", delay=1)
    assert everything() == {}


async def test_a_backoff_that_returns_nonsense_does_not_hinder_an_ack(face: Any) -> None:
    class Broken(tenacity.wait.wait_base):
        def __call__(self, retry_state: tenacity.RetryCallState) -> float:
            return NAN

    topic = face.topic("t", backoff=Broken())
    await topic.trigger("k")
    taken = await topic.take(1)
    with pytest.raises(InvalidArgument, match=r"^backoff="):
        await topic.nack(taken)
    assert await topic.ack(taken) == ["ok"]


# -- another policy ---------------------------------------------------------------------------------------------------


@pytest.fixture
def other(url: str, namespace: str, clock: Clock) -> Any:
    """A second gate on the same namespace: another program."""
    with Gate(url, namespace=namespace, clock=clock) as gate:
        yield gate


CHANGES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"window": "60s"}, {"window": 60.0}, {"window": "2m"}),
    ({"quiet": "5s", "max_delay": None}, {"quiet": 5, "max_delay": None}, {"window": "5s"}),
    ({"quiet": 5, "max_delay": 60}, {"quiet": 5, "max_delay": "1m"}, {"quiet": 5, "max_delay": None}),
    ({"window": 60, "max_size": 5}, {"window": 60, "max_size": 5}, {"window": 60, "max_size": 6}),
    ({"window": 60, "edge": "leading"}, {"window": 60, "edge": "leading"}, {"window": 60}),
    ({"merge": "append"}, {"merge": append(1000)}, {"merge": append(7)}),
    ({"merge": {"a": "sum", "b": "min"}}, {"merge": {"b": "min", "a": "sum", "*": "last"}}, {"merge": {"a": "sum"}}),
    ({"slots": 4}, {"slots": 4}, {"slots": 8}),
    ({"dedup_retention": "2h"}, {"dedup_retention": 7200}, {"dedup_retention": "1h"}),
    ({"priority": True}, {"priority": True}, {"priority_boost": "1s"}),
    ({"priority_boost": "2s"}, {"priority_boost": 2, "priority": True}, {"priority_boost": "3s"}),
    ({"group_concurrency": 2}, {"group_concurrency": 2}, {"group_concurrency": 3}),
    ({"concurrency": 8}, {"concurrency": 8}, {"concurrency": 9}),
    ({"rate": "60/m", "burst": 2}, {"rate": 1, "burst": 2}, {"rate": 1, "burst": 3}),
]


@pytest.mark.parametrize(("made", "same", "changed"), CHANGES, ids=" ".join)
async def test_a_topic_reopened_with_another_policy(
    face: Any, other: Gate, everything: Dumps, made: Any, same: Any, changed: Any
) -> None:
    # Given a topic that another program made
    other.topic("t", **made).open()
    other.topic("u", **made).open()
    before = everything()
    # When it is opened with the same policy, spelled in another way, and with another lease
    await face.topic("t", **same, lease="5m").stats()
    # Then that is well; a differing one is an error that names topic, value and fix, and writes nothing
    with pytest.raises(PolicyChanged, match=r"^topic 'u' exists with another policy \(.*raise revision=") as caught:
        await face.topic("u", **changed).trigger("k", {"a": 1, "b": 1})
    assert caught.value.topic == "u"
    assert caught.value.stored.keys() == caught.value.asked.keys() != set()
    assert everything() == before


def test_the_error_says_both_values(gate: Gate, other: Gate) -> None:
    other.topic("t", window="60s").open()
    with pytest.raises(PolicyChanged) as caught:
        gate.topic("t", quiet="5s", max_delay=None, slots=2).open()
    assert caught.value.stored == {"quiet": None, "slots": 1, "window": 60.0}
    assert caught.value.asked == {"quiet": 5.0, "slots": 2, "window": None}


def test_one_program_may_not_say_two_policies(gate: Gate, everything: Dumps) -> None:
    assert gate.topic("t", window="60s") is gate.topic("t", window=60)
    with pytest.raises(PolicyChanged, match=r"window is 60\.0, asked 61\.0"):
        gate.topic("t", window="61s")
    assert everything() == {}


def test_two_policies_of_one_program_are_named_as_such(gate: Gate, other: Gate) -> None:
    # Given a declaration that was never compared with the store
    gate.topic("t", slots=16)
    with pytest.raises(PolicyChanged) as caught:
        gate.topic("t", slots=8)
    # Then the error is about the program, not about a stored policy
    assert caught.value.where == "program"
    assert "this program declares topic 't' twice" in str(caught.value)
    assert "(slots is 16, asked 8)" in str(caught.value)
    assert "revision" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param({"slots": 16}, {"slots": 8, "window": "5s"}, id="slots"),
        pytest.param({"slots": 8, "window": "5s", "merge": "append"}, {"slots": 8, "window": "5s"}, id="merge"),
        pytest.param({"slots": 16, "revision": 1}, {"slots": 8, "window": "5s"}, id="revision"),
        pytest.param({"slots": 16}, {}, id="the stored policy"),
    ],
)
async def test_a_refused_declaration_does_not_stick(face: Any, other: Gate, wrong: Any, right: Any) -> None:
    # Given a declaration that the server refused, of a topic with a handler
    other.topic("t", slots=8, window="5s").open()
    topic = face.topic("t", **wrong)

    def handle(delivery: object) -> None: ...

    face.gate.topics["t"].handler(handle)
    for _ in range(2):
        with pytest.raises(PolicyChanged, match="exists with another policy"):
            await topic.trigger("k")
    # When the program declares it as it is stored
    again = face.topic("t", **right)
    # Then it can be used, with its handler
    assert (await again.trigger("k")).status == "scheduled"
    assert (await topic.trigger("k")).status == "merged"
    assert face.gate.topics["t"].definition.handler is handle
    assert face.gate.topics["t"].policy.slots == 8
    # And another policy is refused as before, by either
    with pytest.raises(PolicyChanged, match="slots is 8, asked 32"):
        await face.topic("t", slots=32, window="5s").trigger("k")


def test_a_declaration_after_a_refused_one_may_be_refused_too(gate: Gate, other: Gate) -> None:
    other.topic("t", slots=8).open()
    for slots in (16, 32):
        with pytest.raises(PolicyChanged, match=f"slots is 8, asked {slots}"):
            gate.topic("t", slots=slots).open()
    assert gate.topic("t", slots=8).trigger("k").status == "scheduled"


async def test_the_higher_revision_is_stored_and_the_lower_one_adopts_it(
    face: Any, other: Gate, url: str, clock: Clock, caplog: Any
) -> None:
    other.topic("t", window="60s", lease="9s").trigger("k")
    # When a program declares a higher revision
    topic = face.topic("t", window="5s", revision=1)
    await topic.trigger("j")
    # Then the new policy holds for new messages; what is pending keeps its time
    clock.advance("5s")
    taken = await topic.take(10)
    assert [one.key for one in taken] == ["j"]
    await topic.ack(taken)
    clock.advance("55s")
    assert [one.key for one in await topic.take(10)] == ["k"]
    # And the former release starts again with it, and says so once
    with Gate(url, namespace=other.namespace, clock=clock) as former:
        for _ in range(3):
            late = former.topic("t", window="60s", lease="9s")
            assert (late.trigger("n").due_at - clock.now()).total_seconds() == 5
        assert (late.policy.window, late.policy.revision, late.policy.lease) == (5_000, 1, 9_000)
        assert former.counters["topic.policy_adopted"] == 1
        assert former.context.activity.adopted == {"t": (1, 0)}
    assert [record.getMessage() for record in caplog.records if "policy_adopted" in record.getMessage()] == [
        "topic.policy_adopted topic='t' revision=1 declared=0"
    ]
    # But another policy of the same revision is an error
    with Gate(url, namespace=other.namespace) as third, pytest.raises(PolicyChanged, match=r"window is 5\.0, asked 60"):
        third.topic("t", window="60s", revision=1).open()


async def test_a_late_copy_of_a_revision_does_not_undo_a_later_one(face: Any, other: Gate) -> None:
    # Given the request with which a program raises the revision
    other.topic("t", window="60s").open()
    link, definition = face.gate.context.link, face.gate.topic("t", window="5s", revision=1).definition
    request = definition.open_call()
    definition.apply_open_reply(link.run(request))
    # When another program raises it further, and a copy of the request arrives late
    other.topic("t", window="7s", revision=2).open()
    link.run(request)
    # Then the later policy stays
    (stored,) = face.gate.stored_topics()
    assert (stored.policy.window, stored.policy.revision) == (7_000, 2)


async def test_a_revision_may_return_to_the_plain_policy(face: Any, other: Gate, clock: Clock) -> None:
    other.topic("t", window="60s").open()
    # When a higher revision has no policy at all, that is not the stored one taken over
    topic = face.topic("t", revision=1)
    assert (await topic.trigger("k")).due_at == clock.now()


async def test_of_two_revisions_in_one_program_the_higher_one_holds(face: Any, clock: Clock) -> None:
    for window, revision in (("60s", 0), ("5s", 2), ("30s", 1), ("60s", 0)):
        topic = face.topic("t", window=window, revision=revision)
        await topic.trigger(revision)
    assert (topic.policy.window, topic.policy.revision) == (5_000, 2)
    assert face.gate.counters["topic.policy_adopted"] == 1
    with pytest.raises(PolicyChanged, match=r"declares topic 't' twice.*window is 5\.0, asked 6\.0"):
        face.topic("t", window="6s", revision=2)


@pytest.mark.parametrize("revision", [-1, True, "1", 1.5, 1 << 60])
def test_a_revision_that_is_none_is_refused(gate: Gate, everything: Dumps, revision: Any) -> None:
    with pytest.raises(InvalidArgument, match="revision"):
        gate.topic("t", revision=revision)
    assert everything() == {}


@pytest.mark.parametrize(
    ("made", "asked", "payload"),
    [
        ("sum", "append", 1),
        ("sum", "min", 1),
        ({"a": "sum"}, {"a": "min"}, {"a": 1}),
        ({"a": "sum"}, {"b": "sum"}, {"a": 1}),
    ],
)
async def test_a_revision_does_not_change_how_payloads_merge(
    face: Any, other: Gate, everything: Dumps, made: Any, asked: Any, payload: Any
) -> None:
    # Given pending messages, packed as a sum
    other.topic("t", window="5s", merge=made).trigger("k", payload)
    before = everything()
    # Then no program can make lists of them, or the least of what was a sum
    with pytest.raises(PolicyChanged, match="slots and merge cannot"):
        await face.topic("t", window="5s", merge=asked, revision=1).trigger("k", payload)
    assert everything() == before


async def test_a_revision_does_not_change_slots(face: Any, other: Gate, everything: Dumps) -> None:
    other.topic("t", slots=4).open()
    before = everything()
    with pytest.raises(PolicyChanged, match="slots and merge cannot be changed"):
        await face.topic("t", slots=8, revision=1).trigger("k")
    assert everything() == before


async def test_a_topic_named_without_a_policy_takes_the_stored_one_over(face: Any, other: Gate, clock: Clock) -> None:
    # Given a topic with a policy that another program made
    other.topic("t", window="60s", max_size=3, merge={"n": "sum", "*": "first"}, slots=4).trigger("k", {"n": 1, "x": 1})
    # When this one names it only, with a lease of its own
    topic = face.topic("t", lease="5m")
    receipt = await topic.trigger("k", {"n": 2, "x": 2})
    # Then its triggers merge by the stored policy
    assert receipt.status == "merged"
    assert (receipt.due_at - clock.now()).total_seconds() == 60
    clock.advance("60s")
    (delivery,) = await topic.take(1)
    assert delivery.payload == {"n": 3, "x": 1}
    assert ((await topic.peek("k")).lease_until - clock.now()).total_seconds() == 300
    assert (await topic.trigger("j", {"n": 1})).due_at is not None
    with pytest.raises(InvalidArgument, match="not an int or float"):
        await topic.trigger("j", {"n": "x"})


async def test_a_topic_named_without_a_policy_is_made_plain_when_it_is_new(
    face: Any, other: Gate, clock: Clock
) -> None:
    topic = face.topic("t")
    assert (await topic.trigger("k")).due_at == clock.now()
    with pytest.raises(PolicyChanged):
        other.topic("t", window="60s").open()


def test_the_policy_may_be_said_after_the_name(gate: Gate) -> None:
    # Given a topic that was first named without its policy, as a module does that only triggers
    named = gate.topic("t")
    said = gate.topic("t", window="60s")
    assert named is said is gate.topic("t")
    assert (said.trigger("k").due_at, said.policy.window) != (None, None)
    assert gate.aio.topic("t").policy.window == 60_000


# -- foreign data -----------------------------------------------------------------------------------------------------


LETTER = pack([b"k", pack_message(b"\x01\x01"), b"no", 1, 9])


def _verbs(topic: Any, delivery: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "trigger": lambda: topic.trigger("k", event_id="e", version=1),
        "trigger_many": lambda: topic.trigger_many([("k", 1), ("j", 2)]),
        "take": lambda: topic.take(1),
        "ack": lambda: topic.ack(delivery),
        "nack": lambda: topic.nack(delivery),
        "bury": lambda: topic.bury(delivery),
        "release": lambda: topic.release(delivery),
        "extend": lambda: topic.extend(delivery),
        "cancel": lambda: topic.cancel("k"),
        "bury a key": lambda: topic.bury("k"),
        "reschedule": lambda: topic.reschedule("k", delay=1),
        "flush a key": lambda: topic.flush("k"),
        "flush": topic.flush,
        "peek": lambda: topic.peek("k"),
        "versions": lambda: topic.versions("k"),
        "reset_version": lambda: topic.reset_version("k"),
        "stats": topic.stats,
        "next_due": topic.next_due,
        "pause": topic.pause,
        "resume": topic.resume,
        "forward_once": topic.forward_once,
        "dead.list": topic.dead.list,
        "dead.redrive": topic.dead.redrive,
        "dead.delete": lambda: topic.dead.delete(["0-1"]),
        "dead.load": lambda: topic.dead.load([LETTER]),
    }


async def _used(face: Any, clock: Clock) -> tuple[Any, Any]:
    """A topic with something everywhere: pending, in flight, waiting, dead."""
    topic = face.topic("t")
    face.gate.topic("t").forward("list")
    await topic.trigger_many([("dead", 1), ("flying", 1)])
    dead, flying = await topic.take(2)
    await topic.bury(dead)
    await topic.trigger("flying", event_id="e0", version=0)
    await topic.trigger("k", delay="60s")
    clock.advance("31s")
    await topic.extend(flying)
    await topic.trigger("k")
    return topic, flying


async def _refusal(verb: Callable[[], Awaitable[Any]]) -> UnexpectedData | None:
    try:
        await verb()
    except UnexpectedData as error:
        return error
    return None


async def _all_refuse(topic: Any, delivery: Any, everything: Dumps, at_fault: bytes, problem: str) -> None:
    before = everything()
    for name, verb in _verbs(topic, delivery).items():
        with pytest.raises(UnexpectedData, match=rf"{problem}.*Nothing was written") as caught:
            await verb()
        assert caught.value.redis_key == at_fault.decode(), name
        assert str(caught.value).startswith(at_fault.decode()), name
        assert everything() == before, name


@pytest.mark.damages("wrong-type", "conservation")
@pytest.mark.parametrize("part", PARTS)
async def test_a_key_of_another_type_is_left_alone(
    face: Any, raw: Any, clock: Clock, everything: Dumps, namespace: str, part: str
) -> None:
    topic, delivery = await _used(face, clock)
    # Given something foreign where a part of the slot should be
    key = f"ig2:{{{namespace}:topic:t:0/1}}:{part}".encode()
    raw.delete(key)
    raw.rpush(key, "foreign")
    before, refused = everything(), set[str]()
    for name, verb in _verbs(topic, delivery).items():
        # Then a verb that needs the key names it and writes nothing, and no other verb changes the key
        state, error = everything(), await _refusal(verb)
        if error is not None:
            refused.add(name)
            assert error.redis_key == key.decode(), name
            assert "holds a list, expected a" in str(error), name
            assert everything() == state, name
        assert everything()[key] == before[key], name
    # All but the most frequent ones check the whole slot first
    assert _verbs(topic, delivery).keys() - refused <= {"trigger", "trigger_many", "take", "ack", "extend"}


@pytest.mark.damages("wrong-type")
@pytest.mark.parametrize("part", PARTS)
async def test_a_key_of_another_type_is_found_where_the_slot_has_no_other(
    face: Any, raw: Any, everything: Dumps, namespace: str, part: str
) -> None:
    topic = face.topic("t")
    # Given a slot of which nothing is left but something foreign where a part of it should be
    await topic.cancel("k")
    raw.delete(*raw.keys(f"ig2:{{{namespace}:topic:t:0/1}}:*") or [b"none"])
    raw.rpush(f"ig2:{{{namespace}:topic:t:0/1}}:{part}", "foreign")
    before = everything()
    # When the slot is used, then the key is named, and nothing is written
    with pytest.raises(UnexpectedData, match=f":{part}: holds a list, expected a"):
        await topic.cancel("k")
    assert everything() == before


@pytest.mark.damages("conservation")
@pytest.mark.parametrize("onward", [False, True])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("damage", ["spoilt", "gone"])
async def test_what_stands_before_an_unreadable_message_is_handed_out_or_sent_on(
    face: Any, raw: Any, clock: Clock, everything: Dumps, namespace: str, damage: str, priority: bool, onward: bool
) -> None:
    # Given messages that are due one after the other, of which the third is not as it was written
    topic, keys = face.topic("t", priority=priority), "abcde"
    for key in keys:
        await topic.trigger(key)
        clock.advance("1s")
    sent_on = face.gate.topic("t", priority=priority)
    sent_on.forward("list")

    async def next_keys() -> list[str]:
        if not onward:
            return [one.key for one in await topic.take(5)]
        sent, (box,) = await topic.forward_once(5), sent_on.forward_targets()
        return [sent_on.decode_forwarded(entry).key for entry in raw.lrange(box, -sent, -1)]

    slot = f"ig2:{{{namespace}:topic:t:0/1}}"
    if damage == "spoilt":
        raw.hset(f"{slot}:messages", "c", b"spoilt")
    else:
        raw.hdel(f"{slot}:messages", "c")
    # When they are taken, then those before it come
    assert await next_keys() == ["a", "b"]
    # And once what is wrong is removed as the errors say, which wrote nothing, all others come
    for removing in ["HDEL", "ZREM"] if damage == "spoilt" else ["ZREM"]:
        before = everything()
        with pytest.raises(UnexpectedData, match=rf"Nothing was written to it; {removing} ") as caught:
            await next_keys()
        assert everything() == before
        raw.execute_command(*shlex.split(str(caught.value).partition("written to it; ")[2]))
    assert await next_keys() == ["d", "e"]


@pytest.mark.damages("disagrees", "lease")
@pytest.mark.parametrize("score", [10**15, 9 * 10**18, -(10**15)])
async def test_a_time_that_is_none_is_told_when_it_is_read(face: Any, raw: Any, namespace: str, score: int) -> None:
    # Given a message that is due, and a lease that ends, at a time that Python does not know
    topic = face.topic("t")
    await topic.trigger("flying")
    await topic.take(1)
    await topic.trigger("k", delay="60s")
    raw.zadd(f"ig2:{{{namespace}:topic:t:0/1}}:scheduled", {"k": score})
    await topic.cancel("flying")
    raw.hset(f"ig2:{{{namespace}:topic:t:0/1}}:meta", "term", 0)
    raw.zadd(f"ig2:{{{namespace}:topic:t:0/1}}:leases", {"flying": 1000 * score})
    # Then whatever reads it raises what it raises for all that is not ours
    asked: list[Callable[[], Awaitable[Any]]] = [lambda: topic.peek("k"), lambda: topic.peek("flying"), topic.stats]
    for ask in asked:
        with pytest.raises(DecodeError, match=f"{score} ms since 1970 is no time"):
            await ask()


async def test_a_delivery_that_was_due_at_no_time_says_so(face: Any, raw: Any, namespace: str) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    raw.zadd(f"ig2:{{{namespace}:topic:t:0/1}}:scheduled", {"k": -(10**15)})
    raw.hset(f"ig2:{{{namespace}:topic:t:0/1}}:meta", "flushed", 1)
    # When it is taken, then all else can be read, and it can be settled
    (delivery,) = await topic.take(1)
    assert delivery.key == "k"
    with pytest.raises(DecodeError, match="is no time"):
        _ = delivery.due_at
    assert await topic.ack(delivery) == "ok"


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize(("stands", "asked"), [("g", "g"), ("g", None), (None, "g")])
@pytest.mark.parametrize("damage", ["next", "group:active"])
async def test_a_trigger_that_meets_a_group_looks_at_what_is_stored_of_it(
    face: Any, raw: Any, everything: Dumps, namespace: str, stands: str | None, asked: str | None, damage: str
) -> None:
    # Given a message behind a delivery of its key, another one of the group in flight, and either not as it was written
    topic = face.topic("t")
    await topic.trigger_many([Trigger("k", group=stands), Trigger("other", group="g")])
    await topic.take(2)
    await topic.trigger("k", group=stands)
    key, field = f"ig2:{{{namespace}:topic:t:0/1}}:{damage}", "k" if damage == "next" else "g"
    raw.hset(key, field, b"spoilt")
    before = everything()
    # Then a trigger raises, and nothing is written
    with pytest.raises(UnexpectedData, match="Nothing was written") as caught:
        await topic.trigger("k", group=asked)
    assert caught.value.redis_key == key
    assert everything() == before


@pytest.mark.damages("wrong-type")
async def test_a_slot_of_another_layout_is_left_alone(
    face: Any, raw: Any, clock: Clock, everything: Dumps, namespace: str
) -> None:
    topic, delivery = await _used(face, clock)
    # Given a slot that a later version of this library wrote
    key = f"ig2:{{{namespace}:topic:t:0/1}}:meta".encode()
    raw.hset(key, "v", "4")
    await _all_refuse(topic, delivery, everything, key, "has layout 4, this version supports layout 3")


@pytest.mark.damages("wrong-type")
def test_a_slot_of_another_layout_is_left_alone_by_a_worker(
    gate: Gate, raw: Any, everything: Dumps, namespace: str
) -> None:
    # Given a worker that settles a delivery and takes the next in one call, and a slot of a later version
    topic = gate.topic("t")
    topic.trigger_many([("k", 1), ("next", 1)])
    (delivery,) = topic.take(1)
    key = f"ig2:{{{namespace}:topic:t:0/1}}:meta"
    raw.hset(key, "v", "4")
    before = everything()
    # Then its ack is refused and nothing is written
    with pytest.raises(UnexpectedData, match="has layout 4"):
        gate.context.link.run(topic.open().settle_and_take(0, [Settlement("ack", delivery)], 10))
    assert everything() == before


@pytest.mark.damages("wrong-type")
async def test_a_take_by_priority_checks_the_slot_before_it_moves_anything(
    face: Any, raw: Any, everything: Dumps, namespace: str
) -> None:
    topic = face.topic("t", priority=True)
    await topic.trigger("k", priority=1)
    raw.rpush(f"ig2:{{{namespace}:topic:t:0/1}}:inflight", "foreign")
    before = everything()
    with pytest.raises(UnexpectedData, match="holds a list, expected a hash"):
        await topic.take(1)
    assert everything() == before


@pytest.mark.damages("wrong-type")
async def test_a_trigger_that_deletes_expired_facts_checks_where_they_are_first(
    face: Any, raw: Any, everything: Dumps, namespace: str
) -> None:
    # Given a slot whose next trigger is the 64th, which also deletes expired facts
    topic = face.topic("t")
    await topic.trigger_many([(number, number) for number in range(63)])
    raw.rpush(f"ig2:{{{namespace}:topic:t:0/1}}:dedup", "foreign")
    before = everything()
    with pytest.raises(UnexpectedData, match="holds a list, expected a hash"):
        await topic.trigger("k")
    assert everything() == before


@pytest.mark.damages("undecodable", "unplaced", "orphan")
@pytest.mark.parametrize("damage", ["flags", "message"])
async def test_a_message_with_unknown_flags_and_a_lease_without_a_message_are_named(
    face: Any, raw: Any, clock: Clock, everything: Dumps, namespace: str, damage: str
) -> None:
    topic, part = face.topic("t", lease="30s"), f"ig2:{{{namespace}:topic:t:0/1}}:"
    await topic.trigger("k", 1, group="g" if damage == "flags" else None)
    if damage == "flags":
        raw.hset(part + "messages", "k", b"\4" + raw.hget(part + "messages", "k")[1:])
    else:
        await topic.take(1)
        raw.hdel(part + "messages", "k")
        clock.advance("30s")
    before = everything()
    with pytest.raises(UnexpectedData) as refused:
        await topic.take(1)
    assert refused.value.redis_key == part + ("messages" if damage == "flags" else "leases")
    assert everything() == before


@pytest.mark.damages("undecodable", "fence", "lease", "conservation")
@pytest.mark.parametrize("number", ["99999999999999999999", "1e999", "nan", "-5"])
@pytest.mark.parametrize(
    ("verb", "field"),
    [
        ("trigger", "accepted"), ("take", "fence"), ("take", "lease"), ("take", "rate"), ("take", "term"),
        ("extend", "fence"), ("extend", "lease"), ("extend", "term"), ("forward_once", "fence"),
    ],
)  # fmt: skip
async def test_a_number_that_is_negative_or_that_lua_cannot_represent_is_refused(
    face: Any, raw: Any, everything: Dumps, namespace: str, verb: str, field: str, number: str
) -> None:
    # Given a foreign number in a field that the verb reads
    made = face.gate.topic("t", slots=1)
    if verb == "forward_once":
        made.forward("list")
    topic = made.aio if face.awaiting else Awaited(made)
    await topic.trigger_many([("a", 1), ("b", 2)])
    arguments = {
        "trigger": ["a"],
        "take": [1],
        "extend": [await topic.take(1)] if verb == "extend" else [],
        "forward_once": [],
    }[verb]
    raw.hset(f"ig2:{{{namespace}:topic:t:0/1}}:meta", field, number)
    before = everything()
    # Then it is refused, and nothing is written
    with pytest.raises(UnexpectedData, match=f"meta: holds corrupt data under {field}\\. "):
        await getattr(topic, verb)(*arguments)
    assert everything() == before


@pytest.mark.damages("wrong-type")
@pytest.mark.parametrize("policy", [{}, {"window": "60s"}, {"window": "60s", "revision": 1}])
async def test_a_foreign_registry_is_left_alone(
    face: Any, raw: Any, everything: Dumps, namespace: str, policy: dict[str, Any]
) -> None:
    key = f"ig2:{{{namespace}:topics}}"
    raw.set(key, "foreign")
    before = everything()
    topic = face.topic("t", **policy)
    with pytest.raises(UnexpectedData, match=r"holds .*Nothing was written") as caught:
        await topic.trigger("k")
    assert caught.value.redis_key == key
    assert everything() == before
