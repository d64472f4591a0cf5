"""The physical limit: bare commands for the same data, packed by redis-py's connection, read by hiredis."""

from __future__ import annotations

import json
import time
from typing import Any

import redis

from benchmarks.peers.speak import RESULT, Answer, main, payload, timed, url

client = redis.Redis.from_url(url())
connection = client.connection_pool.get_connection()
BATCH = 500
TRIGGERS = """
local known = redis.call("HMGET", KEYS[3], "", ARGV[1])
if known[2] then return known[2] end
local scored, packed, keys = {}, {}, {}
for i = 3, #ARGV, 2 do
  keys[#keys + 1] = ARGV[i]
  scored[#scored + 1] = ARGV[2]
  scored[#scored + 1] = ARGV[i]
  packed[#packed + 1] = ARGV[i]
  packed[#packed + 1] = ARGV[i + 1]
end
local pending = redis.call("HMGET", KEYS[2], unpack(keys))
redis.call("ZADD", KEYS[1], "NX", unpack(scored))
redis.call("HSET", KEYS[2], unpack(packed))
redis.call("HSET", KEYS[3], ARGV[1], "ok")
return "ok"
"""
GUARD = "if redis.call('get', KEYS[1]) then return redis.call('get', KEYS[1]) end redis.call('set', KEYS[1], ARGV[1])"


def enqueue_many(tag: str, n: int, delay: float = 0, batch: int = BATCH) -> Answer:
    """One ZADD NX and one HSET for 500 messages, in one round trip: no script, no merging, no policy."""
    with timed(n) as answer:
        for start in range(0, n, batch):
            numbers = range(start, min(n, start + batch))
            scored = [word for number in numbers for word in (delay, f"key:{number}")]
            packed = [word for number in numbers for word in (f"key:{number}", json.dumps(payload(number)))]
            _together(("ZADD", f"{tag}:due", "NX", *scored), ("HSET", f"{tag}:what", *packed))
    return answer


def floor(tag: str, n: int, delay: float) -> Answer:
    """The same writes by a script, 200 a call, which looks for a copy of the request and for what is pending of each
    key, and remembers its answer: no promise costs less than this."""
    sha = client.script_load(TRIGGERS)
    keys = (f"{tag}:due", f"{tag}:what", f"{tag}:told")
    with timed(n) as answer:
        for start in range(0, n, 200):
            numbers = range(start, min(n, start + 200))
            words = [word for number in numbers for word in (f"key:{number}", json.dumps(payload(number)))]
            _together(("EVALSHA", sha, 3, *keys, f"{tag}:{start:010}", delay, *words))
    return answer


def _together(*commands: tuple[object, ...]) -> list[Any]:
    connection.send_packed_command(connection.pack_commands(commands))
    return [connection.read_response() for _ in commands]


def take(tag: str, n: int, wait: float) -> Answer:
    """100 at a time: what is due, its data, and both deleted: no lease, so what is taken is lost with its taker. Where
    nothing is due, it asks again after a millisecond."""
    due, what = f"{tag}:due", f"{tag}:what"
    with timed(n) as answer:
        done = 0
        while done < n:
            ((*keys,),) = _together(("ZRANGE", due, 0, 99))
            if not keys:
                time.sleep(0.001)
                continue
            _together(("HMGET", what, *keys))
            _together(("ZREM", due, *keys), ("HDEL", what, *keys))
            done += len(keys)
    return answer


def evalsha(tag: str, n: int) -> Answer:
    """One EVALSHA a key, one at a time: what a call of one script can reach at best."""
    sha = client.script_load(GUARD)
    with timed(n) as answer:
        for number in range(n):
            connection.send_command("EVALSHA", sha, 1, f"{tag}:{number}", RESULT)
            connection.read_response()
    return answer


if __name__ == "__main__":
    main(
        enqueue=lambda tag, n, delay: enqueue_many(tag, n, delay, batch=1),
        enqueue_many=enqueue_many,
        send=lambda tag, n, tasks: enqueue_many(tag, n),
        floor=floor,
        take=take,
        drain=lambda tag, n, wait, kind="": take(tag, n, wait),
        first=evalsha,
        replay=evalsha,
    )
