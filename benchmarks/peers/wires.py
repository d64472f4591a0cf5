"""Ways to carry one command from Python: redis-py's commands, its connection, a bare socket with hiredis."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import hiredis
import redis

from benchmarks.peers.speak import RESULT, Answer, fields, in_tasks, main, timed, url

SCRIPT = "if redis.call('get', KEYS[1]) then return 0 end redis.call('set', KEYS[1], ARGV[1], 'px', 60000) return 1"
TOGETHER = 100
client = redis.Redis.from_url(url())
connection = client.connection_pool.get_connection()
sha = client.script_load(SCRIPT)
FRAME = b"*5\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n" % sha.encode() + b"$%d\r\n%b\r\n$%d\r\n%b\r\n"
where = fields()
bare = socket.create_connection((where["host"], where["port"]))
bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
reader = hiredis.Reader()


def framed(key: str) -> bytes:
    """The request, framed by hand: packing it word by word costs eight times as much."""
    return FRAME % (len(key), key.encode(), len(RESULT), RESULT.encode())


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
    bare.sendall(framed(key))
    while (reply := reader.gets()) is False:
        reader.feed(bare.recv(65_536))
    return reply


class Together(asyncio.Protocol):
    """As little as asyncio lets one do for calls that travel together: a future each, one write a tick."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.reader = hiredis.Reader()
        self.waiting: deque[asyncio.Future[object]] = deque()
        self.out: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, key: str) -> asyncio.Future[object]:
        if not self.out:
            self.loop.call_soon(self.flush)
        self.out.append(framed(key))
        self.waiting.append(future := self.loop.create_future())
        return future

    def flush(self) -> None:
        self.transport.write(b"".join(self.out))
        self.out.clear()

    def data_received(self, data: bytes) -> None:
        self.reader.feed(data)
        while (reply := self.reader.gets()) is not False:
            self.waiting.popleft().set_result(reply)


def over_loop(tag: str, n: int, tasks: int) -> Answer:
    async def run() -> Answer:
        _, together = await asyncio.get_running_loop().create_connection(Together, where["host"], where["port"])
        return await in_tasks(n, tasks, lambda number: one(together, f"{tag}-{number}"))

    async def one(together: Together, key: str) -> object:
        return await together.ask(key)

    return asyncio.run(run())


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
        socket_async=over_loop,
        pipeline=pipeline,
        packed=packed,
    )
