"""What nodes of a cluster say, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest
import redis.exceptions as rx

from idemgate.store.cluster.topology import REFRESH_INTERVAL, Route, RoutedBatch, Topology, primaries_of
from idemgate.store.resp import key_of, server_error
from tests.for_each import for_each

A, B, C = ("a", 1), ("b", 2), ("c", 3)
ASKED = ("here", 7)
WHOLE = [[0, 8191, [b"a", 1, b"id"], [b"c", 3, b"id"]], [8192, 16383, [b"b", 2, b"id"]]]
LOW, HIGH = b"{b}", b"{a}"  # slots 3300 and 15495


@pytest.fixture
def topology() -> Topology:
    made = Topology([ASKED])
    assert made.start_refresh(0.0) == [ASKED]
    assert made.apply_slots(ASKED, WHOLE)
    return made


def test_a_key_goes_to_the_owner_of_its_slot(topology: Topology) -> None:
    assert (topology.require_owner(LOW), topology.require_owner(HIGH), topology.require_owner(b"x{a}y{b}")) == (A, B, B)
    assert topology.primaries == {A, B}
    assert not topology.stale


def test_a_slot_that_nobody_serves_is_not_asked_for(topology: Topology) -> None:
    assert topology.apply_slots(A, WHOLE[:1])
    assert topology.find_owner(HIGH) is None
    with pytest.raises(rx.ClusterDownError, match="slot 15495"):
        topology.require_owner(HIGH)
    assert topology.stale


def test_an_answer_without_slots_changes_nothing(topology: Topology) -> None:
    assert not topology.apply_slots(C, [])
    assert topology.require_owner(LOW) == A


NAMES: list[tuple[list[Any], tuple[str, int]]] = [
    ([b"127.0.0.1", 5], ("127.0.0.1", 5)),
    ([b"::1", 5, b"id"], ("::1", 5)),
    ([b"node.example", 5, b"id", [b"ip", b"10.0.0.1"]], ("node.example", 5)),
    ([b"", 5, b"id"], ("here", 5)),
    ([None, 5, b"id", [b"ip", b"10.0.0.1"]], ("here", 5)),
    ([b"?", 5, b"id", [b"hostname", b"", b"ip", b"10.0.0.1"]], ("10.0.0.1", 5)),
    ([b"?", 5, b"id", []], ("here", 5)),
    ([b"?", 5, b"id"], ("here", 5)),
]


@for_each(("said", "address"), NAMES, ids=str)
def test_a_node_is_where_it_says_or_where_it_was_asked(said: list[Any], address: tuple[str, int]) -> None:
    assert primaries_of(ASKED, [[0, 16383, said, [b"replica", 9]]]) == [address]


REDIRECTIONS = [
    ("MOVED 3300 10.0.0.1:5", Route(("10.0.0.1", 5))),
    ("MOVED 3300 ::1:5", Route(("::1", 5))),
    ("MOVED 3300 :5", Route(("a", 5))),
    ("MOVED 3300 ?:5", Route(("a", 5))),
    ("ASK 3300 node.example:5", Route(("node.example", 5), asking=True)),
]


@pytest.mark.parametrize(("said", "route"), REDIRECTIONS, ids=str)
def test_a_redirection_is_followed(topology: Topology, said: str, route: Route) -> None:
    assert topology.redirect(server_error(said), Route(A)) == route
    # And remembered only if the slot is there for good
    assert topology.stale is not route.asking
    assert topology.require_owner(LOW) == (A if route.asking else route.node)


@pytest.mark.parametrize(
    ("error", "stale"),
    [
        (server_error("CLUSTERDOWN The cluster is down"), True),
        (server_error("READONLY You can't write against a read only replica."), True),
        (server_error("LOADING Redis is loading the dataset in memory"), True),
        (server_error("TRYAGAIN Multiple keys request during rehashing of slot"), False),
        (server_error("NOSCRIPT No matching script."), False),
        (server_error("MOVED"), False),
        (rx.ConnectionError("gone"), True),
        (rx.TimeoutError("Timeout reading from the server"), True),
    ],
    ids=str,
)
def test_what_makes_the_table_doubtful(topology: Topology, error: Exception, stale: bool) -> None:
    assert topology.redirect(error, Route(A)) is None
    assert topology.stale is stale


def test_the_table_is_read_again_once_and_not_too_often(topology: Topology) -> None:
    assert not topology.is_refresh_due(1e6)
    topology.redirect(server_error("MOVED 3300 c:3"), Route(A))
    assert not topology.is_refresh_due(REFRESH_INTERVAL / 2)
    assert topology.is_refresh_due(REFRESH_INTERVAL)
    # First of whom the redirection named, last of whom could not be asked
    topology.mark_unreachable(B)
    assert topology.start_refresh(REFRESH_INTERVAL) == [C, A, ASKED, B]
    assert not topology.is_refresh_due(1e6)


def test_when_nobody_answers_the_former_table_serves(topology: Topology) -> None:
    topology.fail_refresh(rx.ConnectionError("gone"))
    assert topology.require_owner(LOW) == A
    assert topology.stale
    with pytest.raises(rx.ClusterDownError, match="gone"):
        Topology([ASKED]).fail_refresh(rx.ConnectionError("gone"))
    with pytest.raises(rx.AuthenticationError):
        topology.fail_refresh(rx.AuthenticationError("WRONGPASS"))


def test_what_follows_a_redirected_request_of_its_key_goes_again_behind_it(topology: Topology) -> None:
    # Given requests of two keys, the second of which is redirected when it comes first and not any more afterwards
    batch = RoutedBatch(topology, [LOW, HIGH, HIGH, LOW])
    assert batch.pending == {Route(A): [0, 3], Route(B): [1, 2]}
    batch.add_replies({Route(A): ["one", "four"], Route(B): [server_error("ASK 15495 c:3"), "too early"]})
    # Then both go there, in order, each asking
    assert batch.pending == {Route(C, asking=True): [1, 2]}
    assert Route(C, asking=True).with_asking([b"2", b"3"])[1::2] == [b"2", b"3"]
    batch.add_replies({Route(C, asking=True): ["two", "three"]})
    assert (batch.pending, batch.replies) == ({}, ["one", "two", "three", "four"])


def test_redirections_in_circles_end(topology: Topology) -> None:
    batch, hops = RoutedBatch(topology, [LOW]), 0
    while batch.pending:
        hops += 1
        batch.add_replies(
            {route: [server_error(f"MOVED 3300 {'c:3' if hops % 2 else 'a:1'}")] for route in batch.pending}
        )
    assert hops == 5
    assert str(batch.replies[0]).startswith("MOVED")


COMMANDS = [
    (("EVALSHA", "sha", 1, b"k", b"x"), b"k"),
    (("EVAL", "return 1", 2, "k", "l"), b"k"),
    (("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", "s", ">"), b"s"),
    (("XGROUP", "CREATE", "s", "g", "0"), b"s"),
    (("XADD", "s", "*", "a", 1), b"s"),
    (("PUBLISH", b"c", b"x"), b"c"),
    (("PING",), b""),
]


@for_each(("words", "key"), COMMANDS, ids=str)
def test_the_key_of_a_command(words: tuple[Any, ...], key: bytes) -> None:
    assert key_of(words) == key
