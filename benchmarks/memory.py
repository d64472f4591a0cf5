"""Bytes of the server's memory per remembered key: 21-byte keys, as many of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.contestants import begin, contestants, end
from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import port_of, started, used_memory
from idemgate import Gate

__all__ = ["run"]

RESULT = "a result of just thirty bytes."
PEERS = {"by_hand": "first", "idemkit": "first", "powertools": "first", "idempotency_kit": "first_async"}


def run(plan: Plan) -> list[Row]:
    """The rows; `bytes` has one figure: memory does not vary."""
    with started() as server:
        url = f"redis://127.0.0.1:{port_of(server)}/0"
        with Gate(url, namespace="bench") as gate:
            rows = [_grown(server, who, keep, plan.size(50_000)) for who, keep in _kinds(gate, server).items()]
        with contestants(list(PEERS), url) as sides:
            n = plan.size(5_000)
            for who, side in sides.items():
                rows.append(_grown(server, who, lambda n, side=side, who=who: _ask(side, PEERS[who], n), n))
    print()
    return rows


def _kinds(gate: Gate, server: Any) -> dict[str, Callable[[int], object]]:
    def done(n: int) -> None:
        for number in range(n):
            gate.claim(f"order:{number:015}", scope="o").complete(RESULT)

    def first(n: int) -> None:
        gate.first_many([f"order:{number:015}" for number in range(n)], "24h", scope="o")

    def plain(n: int) -> None:
        with server.pipeline(transaction=False) as pipeline:
            for number in range(n):
                pipeline.set(f"order:{number:015}", "1", px=86_400_000)
            pipeline.execute()

    return {"idemgate, with a 30-byte result": done, "idemgate, first_many": first, "a bare SET PX": plain}


def _ask(side: Any, step: str, n: int) -> None:
    begin(side, step, tag="order-000000000", n=n, **({"tasks": 1} if step == "first_async" else {}))
    end(side)


def _grown(server: Any, who: str, keep: Callable[[int], object], n: int) -> Row:
    """What `n` keys add to the memory, beyond what fewer did before: connections and scripts are there then."""
    server.flushall()
    keep(max(1_000, n // 10))
    server.flushall()
    before = used_memory(server)
    keep(n)
    print(".", end="", flush=True)
    return {"who": who, "step": "memory", "bytes": [(used_memory(server) - before) / n], "ops": [n]}
