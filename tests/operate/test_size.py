"""The screens of the page and `status` on a large namespace: how long each takes, and that none searches for keys.

The variable IDEMGATE_ENTRIES sets the pending messages of each of 100 topics, and its dead letters. There are as many
records as messages. Full size is 10000, with -s for the figures.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from idemgate import Gate, Trigger
from idemgate.audit.running import findings
from idemgate.core import keys
from idemgate.core.calls import new_id
from idemgate.core.version import VERSION
from idemgate.operate.acts import perform
from idemgate.operate.arguments import parse_given, read_command
from idemgate.operate.overview import overview
from idemgate.operate.snapshot import take_snapshot
from idemgate.presence.calls import beat
from idemgate.presence.report import MAX_BYTES, pack_report
from tests.operate.conftest import SEARCHES, sent

ENTRIES = int(os.environ.get("IDEMGATE_ENTRIES", "200"))
TOPICS, PROCESSES, LONG = 100, 200, "at line 7 of what is a long text" * 4
READS = (
    "topic ls", "topic show t7", "topic messages t7", "topic messages t7 --limit 1000", "topic peek t7 order-7",
    "group ls t7", "dead ls t7", "dead ls t7 --reason none", "key show dead-7",
    "key show order-7", "key show nowhere", "worker ls", "worker ls --of t7", "act ls",
)  # fmt: skip


@pytest.fixture
def large(url: str, raw: Any, namespace: str) -> Iterator[Gate]:
    """A gate on a namespace with 100 topics and the reports of 200 processes."""
    with Gate(url, namespace=namespace, presence=False) as gate:
        _fill_topics(gate, raw)
        _fill_records(gate, raw)
        for number in range(PROCESSES):
            report = _report(number)
            assert len(report) > MAX_BYTES * 0.8
            process = new_id().hex()
            gate.context.link.run(beat(namespace, None, process, report))
            raw.persist(keys.presence(namespace, process)[1])
        yield gate
    raw.flushdb()


def _fill_topics(gate: Gate, raw: Any) -> None:
    """Fill one topic, and copy its keys."""
    topic = gate.topic("t0", max_dead_letters=100_000)
    for start in range(0, ENTRIES, 100):
        topic.trigger_many([Trigger(f"dead-{n}", {"n": n}) for n in range(start, start + 100)])
        for delivery in topic.take(100):
            topic.bury(delivery, reason=f"ValueError: {delivery.key}")
    for start in range(0, ENTRIES, 100):
        topic.trigger_many([Trigger(f"order-{n}", {"n": n}, delay="1h") for n in range(start, start + 100)])
    registry = keys.topics(gate.namespace)
    for number in range(1, TOPICS):
        raw.hset(registry, f"t{number}", raw.hget(registry, "t0"))
        names = (*keys.slot(gate.namespace, "t0", 0, 1), keys.slot_history(gate.namespace, "t0", 0, 1))
        for name in names:
            if (stored := raw.dump(name)) is not None:
                raw.restore(name.replace(b":t0:", b":t%d:" % number), 0, stored)


def _fill_records(gate: Gate, raw: Any) -> None:
    gate.claim("order-7", scope="charge").complete("a result")
    record = raw.get(keys.record(gate.namespace, "charge", "order-7"))
    for start in range(0, ENTRIES * TOPICS, 1000):
        names = [keys.record(gate.namespace, "charge", f"order-{start + n}") for n in range(1000)]
        raw.eval(
            "for _, name in ipairs(KEYS) do redis.call('SET', name, ARGV[1], 'EX', 3600) end", 1000, *names, record
        )


def _report(number: int) -> bytes:
    """Return a report without room for more."""
    topics = [f"t{(number + n) % TOPICS}" for n in range(10)]
    facts = {
        "host": f"host-{number}", "pid": number, "version": VERSION, "program": "worker.py", "role": "worker",
        "up": 3_600_000, "places": [8, 16], "calls": [number] * 13, "clock": round(time.time() * 1000),
    }  # fmt: skip
    failures = [[topics[n % 10], f"order-{number + n}", 4, LONG, 1000, 5000] for n in range(20)]
    lists = {
        "running": [[topics[n % 10], f"order-{n}", n * 100, LONG] for n in range(20)], "failures": failures,
        "topics": topics, "times": [[name, [n] * 13, [n] * 13] for n, name in enumerate(topics)], "scopes": ["charge"],
        "refused": [], "held": [["charge", f"order-{number}"]], "outdated": [["t7", f"order-{number}", ""]],
        "adopted": [["t7", 2, 1]], "last_minute": [[name, [n] * 13, [n] * 13] for n, name in enumerate(topics)],
    }  # fmt: skip
    return pack_report(facts, [[f"worker.counter_{n}", n, n, n] for n in range(60)], lists, {})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_screen_and_status_take_few_requests_and_search_nothing(large: Gate, raw: Any) -> None:
    before = take_snapshot(large)
    requests: dict[str, Callable[[], object]] = {
        "status": lambda: findings(take_snapshot(large)),
        "the page, again": lambda: json.dumps(overview(take_snapshot(large, before))),
    }
    requests |= {words: (lambda words=words: _read(large, words)) for words in READS}
    raw.config_set("slowlog-log-slower-than", 100)
    raw.config_set("slowlog-max-len", 10_000)
    print(f"\n{'request':<28} {'ms':>7} {'client':>7} {'server':>7} {'longest':>7} {'scripts':>7}")
    for name, ask in requests.items():
        ask()
        rows = [_measure(raw, ask) for _ in range(5)]
        print(f"{name:<28} " + " ".join(f"{min(column):>7.1f}" for column in zip(*rows, strict=True)))
        assert not sent(raw, ask) & SEARCHES, name
        assert min(row[-1] for row in rows) <= 700, name


def _read(gate: Gate, words: str) -> object:
    verb, arguments = read_command(f"idemgate {words}") or pytest.fail(words)
    return perform(gate, verb, parse_given(verb, arguments), who="")


def _measure(raw: Any, ask: Callable[[], object]) -> tuple[float, ...]:
    """Return the ms of a request, of CPU in the client and the server, of the longest command, and the scripts."""
    raw.slowlog_reset()
    raw.config_resetstat()
    before, cpu, began = raw.info("cpu"), time.process_time(), time.perf_counter()
    ask()
    wall, cpu, after = time.perf_counter() - began, time.process_time() - cpu, raw.info("cpu")
    server = sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))
    longest = max((one["duration"] for one in raw.slowlog_get(1000)), default=0)
    scripts = raw.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
    return wall * 1000, cpu * 1000, server * 1000, longest / 1000, scripts
