"""What three lines lose: the usual `SET NX EX` program beside a guarded one, on a real server.

`python docs/examples/three_lines.py` prints the table of docs/three-lines.md. It waits for no time: it moves the clock
of the guard and the expiry of the keys.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemgate import Gate
from idemgate.testing import Clock, temporary_server

Order = dict[str, object]
ORDER: Order = {"id": "o1", "amount": 5}


class ThreeLines:
    """The usual program. It acknowledges each message for which it returns."""

    def __init__(self, url: str, expiry: int) -> None:
        self.client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 3))  # redis-py sends a command again
        self.expiry = expiry

    def consume(self, order: Order, charge: Callable[[Order], object]) -> object:
        if not self.client.set(f"charge:{order['id']}", "1", nx=True, ex=self.expiry):
            return None  # a copy
        return charge(order)

    request = consume

    def die(self, order: Order) -> None:
        self.consume(order, lambda _: None)  # dead before the charge

    def advance(self, seconds: float) -> None:
        for key in self.client.scan_iter("charge:*"):
            self.client.pexpire(key, self.client.pttl(key) - int(seconds * 1000))

    def is_waited_for(self) -> bool:
        return False  # it has nothing to wait for

    def close(self) -> None:
        self.client.close()


class Guarded:
    """The guarded program. A message that it does not acknowledge is delivered again."""

    def __init__(self, url: str) -> None:
        self.clock = Clock()
        self.gate = Gate(url, clock=self.clock)
        self.guard = self.gate.guard("charge", lease="30s", retention="24h")
        self.client = redis.Redis.from_url(url)

    def consume(self, order: Order, charge: Callable[[Order], object]) -> object:
        while True:
            verdict = self.guard.run(order["id"], charge, order, fingerprint=order)
            if verdict.action != "retry":
                return verdict.error if verdict.action == "reject" else verdict.value
            self.advance(verdict.delay(1))  # the broker delivers it again

    def request(self, order: Order, charge: Callable[[Order], object]) -> object:
        return self.guard.run(order["id"], charge, order, fingerprint=order, wait="30s").value

    def die(self, order: Order) -> None:
        self.gate.claim(order["id"], scope="charge", lease="30s", fingerprint=order)  # this owner never comes back

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def is_waited_for(self) -> bool:
        return bool(self.client.pubsub_channels())  # a copy that waits has subscribed

    def close(self) -> None:
        self.gate.close()
        self.client.close()


class Relay:
    """A way to the server that can lose the next reply: it closes the connection instead."""

    def __init__(self, target: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.target, self.loses = f"{self.folder.name}/relay", target, False
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, server = self.listener.accept()[0], socket.socket(socket.AF_UNIX)
                server.connect(self.target)
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self.copy, args=ends, daemon=True).start()

    def copy(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with source, target:
            with suppress(OSError):
                while (data := source.recv(65_536)) and not (replies and self.loses):
                    target.sendall(data)
            self.loses = self.loses and not replies
            for end in (source, target):  # wakes the other direction
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


class Trial:
    """One situation with one program, on an empty server."""

    def __init__(self, program: ThreeLines | Guarded, relay: Relay) -> None:
        self.program, self.relay = program, relay
        self.charges: list[Order] = []

    def charge(self, order: Order) -> str:
        self.charges.append(order)
        return f"receipt {len(self.charges)}"

    def crash(self) -> str:
        self.program.die(ORDER)
        self.program.consume(ORDER, self.charge)  # the broker delivers it again at once
        return self.count()

    def stall(self) -> str:
        def stalled(order: Order) -> str:
            self.program.advance(40)
            self.program.consume(order, self.charge)  # the broker delivers it again
            return self.charge(order)

        self.program.consume(ORDER, stalled)
        return self.count()

    def late_copy(self) -> str:
        self.program.consume(ORDER, self.charge)
        self.program.advance(3600)
        self.program.consume(ORDER, self.charge)
        return self.count()

    def other_amount(self) -> str:
        self.program.consume(ORDER, self.charge)
        answer = self.program.consume(ORDER | {"amount": 500}, self.charge)
        return "taken for a copy" if answer is None else f"refused: {type(answer).__name__}"

    def lost_reply(self) -> str:
        self.program.consume({"id": "o0", "amount": 1}, lambda _: None)  # connected
        self.relay.loses = True
        self.program.consume(ORDER, self.charge)
        return self.count()

    def waiting_copy(self) -> str:
        answers: list[object] = []
        copy = threading.Thread(target=lambda: answers.append(self.program.request(ORDER, self.charge)))

        def slow(order: Order) -> str:
            copy.start()
            while copy.is_alive() and not self.program.is_waited_for():
                copy.join(0.001)
            return self.charge(order)

        self.program.consume(ORDER, slow)
        copy.join()
        return f"gets {answers[0]}"

    def count(self) -> str:
        times = {0: "never", 1: "once", 2: "twice"}[len(self.charges)]
        known = isinstance(self.program, Guarded) and self.program.gate.counters["once.lost"]
        return f"charged {times}" + (", and it is known" if known else "")


SITUATIONS: dict[str, Callable[[Trial], str]] = {
    "the process dies before the charge": Trial.crash,
    "the process stalls for 40 s": Trial.stall,
    "a copy arrives an hour later": Trial.late_copy,
    "the same key with another amount": Trial.other_amount,
    "the reply of the server is lost": Trial.lost_reply,
    "a copy arrives during the charge": Trial.waiting_copy,
}


@contextmanager
def way_to_a_server() -> Iterator[tuple[str, Relay]]:
    with temporary_server() as url:
        relay = Relay(unquote(urlsplit(url).path))
        with relay.folder, relay.listener:
            yield f"unix://{relay.path}", relay
            relay.listener.shutdown(socket.SHUT_RDWR)


def main() -> None:
    programs: dict[str, Callable[[str], ThreeLines | Guarded]] = {
        "SET NX EX 86400": lambda url: ThreeLines(url, 86_400),
        "SET NX EX 30": lambda url: ThreeLines(url, 30),
        "idemgate": Guarded,
    }
    lines = [f"{'':36}" + "".join(f"{name:18}" for name in programs).rstrip()]
    with way_to_a_server() as (url, relay), redis.Redis.from_url(url) as admin:
        for situation, happens in SITUATIONS.items():
            cells: list[str] = []
            for make in programs.values():
                admin.flushall()
                program = make(url)
                cells.append(happens(Trial(program, relay)))
                program.close()
            lines.append(f"{situation:36}" + "".join(f"{cell:18}" for cell in cells).rstrip())
    print("\n".join(lines))  # together, behind what the guard logs on stderr


if __name__ == "__main__":
    main()
