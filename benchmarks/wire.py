"""Limits: what the server does for a C client, and what redis-py and a bare socket reach for one caller."""

from __future__ import annotations

import csv
import io
import subprocess

from benchmarks.contestants import contestants
from benchmarks.machine import CLIENT, pinned
from benchmarks.measuring import Row, Step, rounds
from benchmarks.plan import Plan
from benchmarks.server import port_of, started

__all__ = ["run"]

SCRIPT = "if redis.call('get',KEYS[1]) then return 0 end redis.call('set',KEYS[1],ARGV[1],'px',60000) return 1"
COMMANDS = {
    "PING": ["PING"],
    "SET NX PX": ["SET", "key:__rand_int__", "1", "NX", "PX", "60000"],
    "ZADD NX": ["ZADD", "due", "NX", "1700000000000", "key:__rand_int__"],
    "EVAL get, set": ["EVAL", SCRIPT, "1", "key:__rand_int__", "1"],
}


def run(plan: Plan) -> list[Row]:
    """The rows of redis-benchmark, one at a time and pipelined by 64, and those of the clients."""
    with started() as server:
        rows = []
        for name, words in COMMANDS.items():
            for pipelined, full in ((1, 50_000), (64, 200_000)):
                rates = []
                for _ in range(min(plan.repetitions, 3)):
                    server.flushall()
                    rates.append(_benchmark(port_of(server), words, plan.size(full), pipelined))
                rows.append({"who": "redis-benchmark", "step": name, "pipelined": pipelined, "rate": rates})
                print(".", end="", flush=True)
        n = plan.size(10_000)
        groups = [[Step(step, {"n": n})] for step in ("set", "evalsha", "connection", "socket", "pipeline", "packed")]
        with contestants(["wires"], f"redis://127.0.0.1:{port_of(server)}/0") as sides:
            return rows + rounds(server, sides, groups, plan.repetitions)


def _benchmark(port: int, words: list[str], n: int, pipelined: int) -> float:
    options = ["-p", str(port), "-n", str(n), "-r", "1000000", "-c", "50", "-P", str(pipelined), "--csv"]
    command = pinned(CLIENT, ["redis-benchmark", *options, *words])
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(list(csv.reader(io.StringIO(told)))[1][1])
