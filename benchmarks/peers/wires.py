"""Ways to carry one command from Python: redis-py's commands, its connection, a bare socket with hiredis."""

from __future__ import annotations

import socket
from collections.abc import Callable

import hiredis
import redis

from benchmarks.peers.speak import RESULT, Answer, fields, main, timed, url

SCRIPT = "if redis.call('get', KEYS[1]) then return 0 end redis.call('set', KEYS[1], ARGV[1], 'px', 60000) return 1"
TOGETHER = 100
client = redis.Redis.from_url(url())
connection = client.connection_pool.get_connection()
sha = client.script_load(SCRIPT)
where = fields()
bare = socket.create_connection((where["host"], where["port"]))
bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
reader = hiredis.Reader()


def one_by_one(call: Callable[[str], object]) -> Callable[..., Answer]:
    def step(tag: str, n: int) -> Answer:
        with timed(n) as answer:
            for number in range(n):
                call(f"{tag}:{number}")
        return answer

    return step


def over_connection(key: str) -> object:
    connection.send_command("EVALSHA", sha, 1, key, RESULT)
    return connection.read_response()


def over_socket(key: str) -> object:
    bare.sendall(hiredis.pack_command(("EVALSHA", sha, 1, key, RESULT)))
    while (reply := reader.gets()) is False:
        reader.feed(bare.recv(65_536))
    return reply


def pipeline(tag: str, n: int) -> Answer:
    with timed(n) as answer:
        for start in range(0, n, TOGETHER):
            together = client.pipeline(transaction=False)
            for number in range(start, start + TOGETHER):
                together.evalsha(sha, 1, f"{tag}:{number}", RESULT)
            together.execute()
    return answer


def packed(tag: str, n: int) -> Answer:
    with timed(n) as answer:
        for start in range(0, n, TOGETHER):
            numbers = range(start, start + TOGETHER)
            commands = [("EVALSHA", sha, 1, f"{tag}:{number}", RESULT) for number in numbers]
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in numbers:
                connection.read_response()
    return answer


if __name__ == "__main__":
    main(
        set=one_by_one(lambda key: client.set(key, RESULT, nx=True, px=60_000)),
        evalsha=one_by_one(lambda key: client.evalsha(sha, 1, key, RESULT)),
        connection=one_by_one(over_connection),
        socket=one_by_one(over_socket),
        pipeline=pipeline,
        packed=packed,
    )
