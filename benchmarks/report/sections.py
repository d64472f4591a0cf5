"""The sections, each from the rows of its part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks import results
from benchmarks.dispatch import NOTHING
from benchmarks.environments import CACHE, NODE, PYTHON
from benchmarks.loops import SIDES, TASKS
from benchmarks.measuring import Row
from benchmarks.plan import APART, PARTS
from benchmarks.report.figures import Rows, count, cpu, middle, ranged, ratio, ratios, rows_of, table
from benchmarks.threads import THREADS, WAYS

__all__ = [
    "backlog",
    "blocks", "cluster", "dispatch", "embedded", "guard_async", "guard_sync", "http", "imports", "lateness", "loops",
    "machine", "memory", "merging", "microseconds", "misses", "peers",
    "pieces", "profile", "runner", "scheduler", "scheduler_alone", "servers", "threads", "unpinned", "wire",
]  # fmt: skip

NAMES = {
    "idemgate_guard": "**idemgate**", "idemgate_run": "idemgate, `guard.run`",
    "idemgate_scheduler": "**idemgate**", "by_hand": "redis-py by hand",
    "redis_lock": "redis.lock", "idemkit": "idemkit", "powertools": "AWS Powertools",
    "idempotency_kit": "idempotency-kit", "bullmq_node": "BullMQ, Node", "bullmq_python": "BullMQ, Python",
    "bare": "limit: bare commands", "limit": "limit: bare socket",
    "idemgate_guard+uvloop": "**idemgate**, uvloop", "by_hand+uvloop": "redis-py by hand, uvloop",
}  # fmt: skip
COSTS = ["client us", "server us"]
OWN = ["date", "commit", "repetitions", "load"]
"""What differs from part to part."""


def name_of(who: str) -> str:
    """A contestant's name for people."""
    return NAMES.get(who, who)


def _costs(rows: Rows, who: str, step: str) -> list[str]:
    """CPU of both sides per operation."""
    return [count(middle(rows, who, step, figure)) for figure in ("client_us", "server_us")]


_BUSY = 2.5
"""Load average above which this is not only us: a client and a server. The part `threads` makes more itself, and
`profile` counts instructions."""


def machine() -> str:
    """What all parts have in common, and what each of them was run with: they may have been run apart."""
    found = {part: run for part in (*PARTS, *APART) if (run := results.load(part)) is not None}
    shared = next(iter(found.values()), {"facts": {}})["facts"]
    common = table(["", ""], ([name, said] for name, said in shared.items() if name not in OWN))
    runs = table(
        ["part", *OWN, "operations"],
        ([part, *(_own(run, name) for name in OWN), f"{run['share']:.0%}"] for part, run in found.items()),
    )
    busy = [
        part for part, run in found.items()
        if part not in ("threads", "profile") and float(run["facts"]["load"].split()[0]) > _BUSY
    ]  # fmt: skip
    warning = f"\n\nOthers used this machine during {', '.join(busy)}: rates there are too low, and ratios are rough."
    return common + "\n\n" + runs + (warning if busy else "")


def _own(run: Any, name: str) -> str:
    if name != "repetitions":
        return str(run["facts"][name])
    took = sorted(
        {len(figures) for row in run["rows"] for name in _REPEATED if len(figures := row.get(name) or []) > 1}
    )
    return " or ".join(map(str, took)) or "1"


_REPEATED = ("rate", "client_us", "server_us", "p50")


def wire() -> str:
    rows = [] if (found := results.load("wire")) is None else found["rows"]
    server = [row for row in rows if row["who"] == "redis-benchmark"]
    commands = dict.fromkeys(row["step"] for row in server)
    rates = {(row["step"], row["pipelined"]): ranged(row["rate"]) for row in server}
    limits = table(
        ["redis-benchmark, 50 clients", "one at a time, per s", "pipelined by 64, per s"],
        ([f"`{step}`", rates[step, 1], rates[step, 64]] for step in commands),
    )
    ways = {
        "set": "redis-py `set`", "evalsha": "redis-py `evalsha`", "connection": "EVALSHA over redis-py's `Connection`",
        "socket": "EVALSHA over a bare socket, hiredis", "pipeline": "redis-py pipeline of 100 EVALSHA",
        "packed": "100 EVALSHA packed over redis-py's `Connection`",
    }  # fmt: skip
    found_rows = rows_of("wire")
    clients = [
        [said, ranged(found_rows.get(("wires", step), {}).get("rate")), *_costs(found_rows, "wires", step)]
        for step, said in ways.items()
    ]
    return limits + "\n\n" + table(["one caller in Python", "per s", *COSTS], clients)


def guard_sync() -> str:
    rows = rows_of("guard")
    whos = [who for who in dict.fromkeys(who for who, _ in rows) if ("rate" in rows.get((who, "first"), {}))]
    failures = [f"{name_of(who)}, {step}: {row['error']}" for (who, step), row in rows.items() if "error" in row]
    return "\n\n".join([_guard_sync(rows, whos), *(f"Failed: {one}" for one in failures)])


def _guard_sync(rows: Rows, whos: list[str]) -> str:
    return table(["one caller", *_BOTH], ([name_of(who), *_both(rows, who, "first", "replay")] for who in whos))


def guard_async() -> str:
    rows = rows_of("guard")
    whos = [who for who in dict.fromkeys(who for who, _ in rows) if "rate" in rows.get((who, "first_async_1"), {})]
    steps = [(tasks, f"first_async_{tasks}", f"replay_async_{tasks}") for tasks in (1, 50, 200)]
    lines = [[str(tasks), name_of(who), *_both(rows, who, a, b)] for tasks, a, b in steps for who in whos]
    many = [
        [said, name_of(who), *_rate(rows, who, step)]
        for step, said in _MANY.items()
        for who in ("idemgate_guard", "by_hand")
    ]
    return table(["tasks", "", *_BOTH], lines) + "\n\n" + table(["200 keys at once", "", "keys per s", *COSTS], many)


_MANY = {
    "first_many": "`first_many`; a pipeline of `SET NX`",
    "claim_many": "`claim_many`, `complete_many`; a pipeline of `SET NX`, run, one of `SET`",
}


_BOTH = [
    cell for word in ("first", "replay") for cell in (f"{word}, per s", "idemgate is", *COSTS, "trips")
]  # fmt: skip
"""The head of `_both`."""


def _both(rows: Rows, who: str, *steps: str) -> list[str]:
    cells: list[str] = []
    for step in steps:
        times = "" if who == "idemgate_guard" else ratio(ratios(rows, step, "idemgate_guard", who))
        trips = middle(rows, who, step, "trips")
        cells += [ranged(rows.get((who, step), {}).get("rate")), times, *_costs(rows, who, step), count(trips, 2)]
    return cells


def threads() -> str:
    """A table of pinned processes, then one of others."""
    rows = rows_of("threads")
    whos = dict.fromkeys(who for who, _ in rows)
    return "\n\n".join(
        table(
            [f"threads, {way}", "", *_BOTH],
            (
                [str(number), name_of(who), *_both(rows, who, f"first, {number}, {way}", f"replay, {number}, {way}")]
                for number in THREADS
                for who in whos
            ),
        )
        for way in WAYS
    )


def loops() -> str:
    """With uvloop, and without; the last column of each step compares the two by the client's CPU."""
    rows = rows_of("loops")
    head = ["tasks", "", *(cell for word in ("first", "replay") for cell in (f"{word}, per s", *COSTS, "of asyncio's"))]
    steps = [(tasks, f"first_async_{tasks}", f"replay_async_{tasks}") for tasks in TASKS]
    return table(
        head,
        (
            [
                str(tasks),
                name_of(who),
                *(cell for step in both for cell in (*_rate(rows, who, step), _of_asyncio(rows, who, step))),
            ]
            for tasks, *both in steps
            for who in SIDES
        ),
    )


def _of_asyncio(rows: Rows, who: str, step: str) -> str:
    name, _, loop = who.partition("+")
    found = ratios(rows, step, who, name, figure="client_us")
    return f"{median(found):.2f}x" if loop and found else ""


def _rate(rows: Rows, who: str, step: str) -> list[str]:
    return [ranged(rows.get((who, step), {}).get("rate")), *_costs(rows, who, step)]


def scheduler_alone() -> str:
    rows = rows_of("scheduler")
    lines = [
        ("`trigger_many`, 500 a call", "idemgate_scheduler", "many"),
        ("bare `ZADD NX` + `HSET` of 500", "bare", "many"),
        ("the same in a script that knows copies and what is pending", "bare", "many_floor"),
        ("worker, sync handler", "idemgate_scheduler", "many_sync"),
        ("worker, async handler", "idemgate_scheduler", "many_async"),
        ("`take(100)`, `ack`, own loop", "idemgate_scheduler", "many_take"),
        ("bare `ZRANGE`, `HMGET`, `ZREM`, `HDEL` of 100, no lease", "bare", "many_take"),
    ]
    cells = [[said, *_rate(rows, who, step)] for said, who, step in lines]
    what = "sent and consumed at once, two processes on one core"
    both = [(what, "idemgate_scheduler"), (f"{what}, bare commands", "bare")]
    cells += [[said, *_both_at_once(rows, who)] for said, who in both]
    return table(["", "messages per s", *COSTS], cells)


def _both_at_once(rows: Rows, who: str) -> list[str]:
    sender, (rate, consumer, server) = count(middle(rows, who, "both", "sender_us")), _rate(rows, who, "both")
    return [rate, f"{sender} + {consumer}", server]


def scheduler() -> str:
    rows = rows_of("scheduler")
    whos = [who for who, step in rows if step == "drain"]
    head = ["", "jobs", "enqueue, per s", *COSTS, "drain, per s", "idemgate is", *COSTS]
    return table(head, ([name_of(who), *_job(rows, who)] for who in sorted(whos, key=lambda who: _order(rows, who))))


def _order(rows: Rows, who: str) -> float:
    return -(middle(rows, who, "drain") or 0.0)


def _job(rows: Rows, who: str) -> list[str]:
    drain = rows[who, "drain"]
    if "rate" not in drain:
        return ["-", *_rate(rows, who, "enqueue"), drain.get("error", "failed"), "", "-", "-"]
    times = "" if who == "idemgate_scheduler" else ratio(ratios(rows, "drain", "idemgate_scheduler", who))
    enqueue, emptied = _rate(rows, who, "enqueue"), _rate(rows, who, "drain")
    return [count(median(drain["ops"])), *enqueue, emptied[0], times, *emptied[1:]]


_UNPINNED = {
    "first": "guard, first call, one caller", "replay": "guard, replay, one caller",
    "first_async": "guard, first call, 200 tasks", "replay_async": "guard, replay, 200 tasks",
    "enqueue_many": "`trigger_many`, 500 a call", "drain": "worker, async handler",
    "both": "sent and consumed at once, two processes",
}  # fmt: skip


def unpinned() -> str:
    rows = rows_of("unpinned")
    lines = [
        [said, *_rate(rows, "pinned", step), *_rate(rows, "not pinned", step), _as_fast(rows, step)]
        for step, said in _UNPINNED.items()
    ]
    own = table(["", "pinned, per s", *COSTS, "not pinned, per s", *COSTS, "not pinned is"], lines)
    ways = ["pinned", "not pinned"]
    against = ([_UNPINNED[step], *(_by_hand(rows, step, way) for way in ways)] for step in _BY_HAND)
    return own + "\n\n" + table(["against redis-py by hand, idemgate is", *ways], against)


_BY_HAND = ["first", "replay", "first_async", "replay_async"]


def _by_hand(rows: Rows, step: str, way: str) -> str:
    ours, theirs = cpu(rows, way, step), cpu(rows, way, f"hand_{step}")
    by_cpu = f", by CPU {theirs / ours:.1f}x" if ours and theirs else ""
    return ratio(ratios(rows, f"hand_{step}", way, way, step)) + by_cpu


def _as_fast(rows: Rows, step: str) -> str:
    return ratio(ratios(rows, step, "not pinned", "pinned"))


def lateness() -> str:
    rows = sorted(rows_of("lateness").values(), key=lambda row: median(row.get("p50", [1e9])))
    lines = ([name_of(row["who"]), *(ranged(row.get(figure), 1) for figure in ("p50", "p99", "max"))] for row in rows)
    return table(["ms after due", "p50", "p99", "longest"], lines)


def merging() -> str:
    rows = rows_of("merging")
    lines = [
        [name_of(who), *step.removeprefix("keep_").split("_"), *_merged(rows, row, who, step)]
        for (who, step), row in rows.items()
    ]
    return table(["", "keeps the", "at once", "triggers", "messages", "per s", "idemgate is", *COSTS], lines)


def _merged(rows: Rows, row: Row, who: str, step: str) -> list[str]:
    if "rate" not in row:
        return ["-", row.get("error", ""), "-", "-", "-", "-"]
    times = "" if who == "idemgate_scheduler" else ratio(ratios(rows, step, "idemgate_scheduler", who))
    sizes = [count(median(row["ops"])), count(median(row["left"]), 0)]
    return [*sizes, ranged(row["rate"]), times, *_costs(rows, who, step)]


def backlog() -> str:
    rows = rows_of("backlog")
    sizes, steps = (list(dict.fromkeys(key[place] for key in rows)) for place in (0, 1))
    if not rows:
        return "Not measured."
    head = ["us of the server, per message", *(f"{int(size):,}" for size in sizes)]
    return table(head, ([_backlog(step), *_sizes(rows, sizes, step)] for step in steps))


def _backlog(step: str) -> str:
    return step.replace("bytes", "bytes of a message")


def _sizes(rows: Rows, sizes: list[str], step: str) -> list[str]:
    figure = "bytes" if step.endswith("bytes") else "server_us"
    return [count(middle(rows, size, step, figure)) for size in sizes]


def memory() -> str:
    """A column for each server."""
    rows = rows_of("memory")
    servers = servers_of(rows)
    whos = dict.fromkeys(who for who, _ in rows)
    lines = ([name_of(who), *(count(middle(rows, who, server, "bytes")) for server in servers)] for who in whos)
    return table(["bytes per key", *servers], lines)


def servers_of(rows: Rows) -> list[str]:
    """The servers that the part `memory` measured, the one of all other parts first."""
    return list(dict.fromkeys(server for _, server in rows))


def blocks() -> str:
    lines = ([f"`{row['who']}`", ranged(row["ms"], 2)] for row in rows_of("blocks").values())
    return table(["script", "longest call, ms"], lines)


def imports() -> str:
    lines = ([f"`import {row['who']}`", ranged(row["ms"], 0)] for row in rows_of("imports").values())
    return table(["", "ms"], lines)


_SAID = {
    "first": "guard, first call", "replay": "guard, replay", "first_async": "guard, first call, 200 tasks",
    "first_many": "`first_many` of 200", "slots": "topic of 8 slots: sent, taken, settled",
    "enqueue_many": "`trigger_many`, 500 a call", "drain": "worker, sync handler",
}  # fmt: skip


def cluster() -> str:
    return _plain(rows_of("cluster"), ["three primaries on one core"])


def embedded() -> str:
    return _plain(rows_of("embedded"), ["server", ""])


_HTTP = {
    "without": "the app without the middleware", "passed on": "the middleware, a request without the header",
    "first": "the middleware, a new key", "replay": "the middleware, a retry",
}  # fmt: skip


def http() -> str:
    rows = rows_of("http")
    lines = ([who, _HTTP[step], count(middle(rows, who, step, "p50")), *_rate(rows, who, step)] for who, step in rows)
    return table(["face", "", "median us", "per s", *COSTS], lines)


def _plain(rows: Rows, head: Sequence[str]) -> str:
    named: Iterable[list[str]] = (
        [*([who] if len(head) > 1 else []), _SAID[step], *_rate(rows, who, step)] for who, step in rows
    )
    return table([*head, "per s", *COSTS], named)


def microseconds() -> str:
    rows = rows_of("microseconds")
    lines = [
        ("guard, first call", "idemgate_guard", "first"), ("`SET NX` + `SET` by hand", "by_hand", "first"),
        ("guard, replay", "idemgate_guard", "replay"), ("`SET NX` + `GET` by hand", "by_hand", "replay"),
        ("limit: one small EVALSHA, redis-py's `Connection`", "bare", "first"),
        ("limit: the same, bare socket and hiredis", "wires", "socket"),
        ("guard, first call, 200 tasks", "idemgate_guard", "first_async"),
        ("`SET NX` + `SET` by hand, 200 tasks", "by_hand", "first_async"),
        ("guard, replay, 200 tasks", "idemgate_guard", "replay_async"),
        ("`SET NX` + `GET` by hand, 200 tasks", "by_hand", "replay_async"),
        ("limit: one small EVALSHA, bare asyncio and hiredis, 200 tasks", "wires", "socket_async"),
        ("`trigger_many`, 500 a call", "idemgate_scheduler", "enqueue_many"),
        ("limit: bare `ZADD NX` + `HSET`", "bare", "enqueue_many"),
        ("`take(100)` + `ack`", "idemgate_scheduler", "take"),
        ("limit: bare `ZRANGE`, `HMGET`, `ZREM`, `HDEL`, no lease", "bare", "take"),
    ]  # fmt: skip
    head = ["us per operation", "together", "client", "server", "of it in scripts", "waiting and wire", "round trips"]
    return table(head, ([said, *_parts(rows, who, step)] for said, who, step in lines))


def _parts(rows: Rows, who: str, step: str) -> list[str]:
    rate = middle(rows, who, step)
    if rate is None:
        return ["-"] * 6
    client, server = (middle(rows, who, step, figure) or 0.0 for figure in ("client_us", "server_us"))
    inside, trips = (middle(rows, who, step, figure) for figure in ("script_us", "trips"))
    rest = max(0.0, 1e6 / rate - client - server)
    return [*(count(one) for one in (1e6 / rate, client, server, inside, rest)), count(trips, 2)]


def pieces() -> str:
    """Beside those of a guarded call, from the guard's part: one that needs no server, decorator and key included."""
    rows = rows_of("pieces")
    known = rows_of("guard").get(("idemgate_guard", "known"), {}).get("client_us")
    whole = ["a whole call of a key known to be done (`cache_size`)", ranged(known, 1)]
    heads = {
        "guard": "a guarded call", "trigger_many": "`trigger_many`, a trigger of 128",
        "worker": "a worker, a message of 80 that end as many begin",
    }  # fmt: skip
    tables = (
        table([head, "client us"], [*_pieces(rows, kind), *([whole] if kind == "guard" else [])])
        for kind, head in heads.items()
    )
    return "\n\n".join(tables)


def _pieces(rows: Rows, kind: str) -> Iterable[list[str]]:
    return ([piece, ranged(row["client_us"], 2)] for (who, piece), row in rows.items() if who == kind)


def runner() -> str:
    """Return the cost of both, and the median of the ratios of the turns."""
    rows = rows_of("runner")
    steps = [step for who, step in rows if who == "once"]
    lines = (
        [
            step.replace("1 tasks", "1 task"),
            *(ranged(rows[who, step]["client_us"], 1) for who in ("once", "guard.run")),
            f"{median(ratios(rows, step, 'guard.run', 'once', figure='client_us')):.2f}x",
        ]
        for step in steps
    )
    return table(["call", "`once`, client us", "`guard.run`, client us", "ratio"], lines) if rows else "Not measured."


def profile() -> str:
    """Of the server that tells them by role."""
    rows = {step: row for (_, step), row in rows_of("profile").items() if "lua" in row}
    head = ["instructions, for each", "all", *_ROLES.values()]
    lines = ([step, *(count(row[role][0]) for role in ("all", *_ROLES))] for step, row in rows.items())
    return table(head, lines) if rows else "Not measured."


def servers() -> str:
    """The instructions on each server."""
    rows = {key: row for key, row in rows_of("profile").items() if "data_misses" not in row}
    names, steps = (list(dict.fromkeys(key[place] for key in rows)) for place in (0, 1))
    lines = ([step, *(count(middle(rows, name, step, "all")) for name in names)] for step in steps)
    return table(["instructions, for each", *names], lines) if rows else "Not measured."


_ROLES = {
    "lua": "Lua", "packing": "struct, cmsgpack", "plumbing": "calls out of Lua", "commands": "commands",
    "network": "network, protocol", "allocator": "of all: allocator", "libc": "libc",
}  # fmt: skip


def misses() -> str:
    rows = {key: row for key, row in rows_of("profile").items() if "data_misses" in row}
    head = ["for each message", "pending", "instructions", "data not in 1 MiB", "not in 32 MiB"]
    figures = ("all", "data_misses", "last_misses")
    steps = dict.fromkeys(step for _, step in rows)
    lines = (
        [said, f"{int(size):,}", *(count(row[figure][0]) for figure in figures)]
        for said in steps
        for (size, step), row in rows.items()
        if step == said
    )
    return table(head, lines) if rows else "Not measured."


def dispatch() -> str:
    """Pieces of a script call beyond one that does nothing, then whole scripts."""
    found = {step: row["server_us"] for (_, step), row in rows_of("dispatch").items()}
    nothing = found.get(NOTHING, [])
    lines = []
    for name, figures in found.items():
        piece = name != NOTHING and not name.startswith("the whole")
        cells = [a - b for a, b in zip(figures, nothing, strict=True)] if piece else figures
        lines.append([f"more for: {name}" if piece else name, ranged(cells, 1)])
    return table(["sent 100 at a time", "server us"], lines)


def peers() -> str:
    """What was asked for, and the redis-py that each of them brought."""
    wanted = {**NODE, **PYTHON}
    lines = ([name_of(name), ", ".join(what), _redis_py(name)] for name, what in wanted.items())
    return table(["peer", "installed", "redis-py"], lines)


def _redis_py(name: str) -> str:
    found = (CACHE / name).glob("lib/python*/site-packages/redis-*.dist-info")
    return ", ".join(sorted(one.name.removeprefix("redis-").removesuffix(".dist-info") for one in found)) or "-"
