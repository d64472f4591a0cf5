"""What the pieces of one guarded call cost the client, each alone: CPU of this process, no server."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import hiredis

from benchmarks.measuring import Row
from benchmarks.peers.speak import RESULT
from benchmarks.plan import Plan
from idemgate import Gate
from idemgate.core.tokens import token

__all__ = ["run"]


def run(plan: Plan) -> list[Row]:
    """The rows, `client_us` only."""
    n = plan.size(20_000)
    return [
        {"who": "piece", "step": name, "client_us": [_cost(piece, n) for _ in range(plan.repetitions)]}
        for name, piece in _pieces(Gate("redis://localhost", namespace="bench")).items()
    ]


def _pieces(gate: Gate) -> dict[str, Callable[[], object]]:
    claims, codec = gate.claims, gate.codec
    record, owner = claims.key("sync", "order:123456"), token()
    claim = claims.claim(record, owner, 30_000, 86_400_000)
    words = ("EVALSHA", claim.script.sha, 1, *claim.keys, *claim.args)
    stored = codec.encode(RESULT)
    bare = hiredis.pack_command(words)
    reader = hiredis.Reader()

    def read() -> object:
        reader.feed(bare)  # any array of as many strings
        return reader.gets()

    return {
        "the key's name in Redis": lambda: claims.key("sync", "order:123456"),
        "the owner's token": token,
        "building the claim's call, framed": lambda: claims.claim(record, owner, 30_000, 86_400_000),
        "packing as many words (hiredis), where a call is not framed": lambda: hiredis.pack_command(words),
        "reading as many words (hiredis)": read,
        "packing the result": lambda: codec.encode(RESULT),
        "unpacking it": lambda: codec.decode(stored),
    }


def _cost(piece: Callable[[], object], n: int) -> float:
    began = process_time()
    for _ in range(n):
        piece()
    return (process_time() - began) / n * 1e6
