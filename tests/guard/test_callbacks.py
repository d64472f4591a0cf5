"""`gate.callback`: a guarded callback for the loop of another library."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from idemgate import Gate, InvalidArgument
from tests.waiting import wait_until

Message = dict[str, Any]


def counted(gate: Gate) -> dict[str, int]:
    """The counters of callbacks that are not zero."""
    return {
        name.removeprefix("callback."): n
        for name, n in gate.counters.snapshot().items()
        if name.startswith("callback.")
    }


def test_of_two_listeners_of_redis_py_one_handles_each_message_and_both_live(
    url: str, namespace: str, raw: redis.Redis[bytes]
) -> None:
    # Given two replicas, each with a listener of redis-py in a thread, guarded with default options
    ran: list[bytes] = []
    gates = [Gate(url, namespace=namespace) for _ in range(2)]
    threads = []
    for gate in gates:

        @gate.callback(key="{message[data]}", scope="prices")
        def handle(message: Message) -> None:
            ran.append(message["data"])

        pubsub = redis.Redis.from_url(url).pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe(**{namespace: handle})
        pubsub.get_message(timeout=30)  # the server's confirmation, which it hides
        threads.append(pubsub.run_in_thread(sleep_time=0.01))
    # When ten messages are published twice
    for number in [*range(10), *range(10)]:
        raw.publish(namespace, f"m{number}")
    wait_until(lambda: sum(sum(counted(gate).values()) for gate in gates) >= 40)
    # Then each ran once, and both listeners are alive
    assert sorted(ran) == sorted(f"m{number}".encode() for number in range(10))
    assert all(thread.is_alive() for thread in threads)
    for thread, gate in zip(threads, gates, strict=True):
        thread.stop()
        thread.join()
        gate.close()


def test_the_guard_raises_nothing_into_the_loop(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[Message] = []

    @gate.callback(key="{message[id]}", scope="s", fingerprint=["message[n]"])
    def handle(message: Message) -> str:
        ran.append(message)
        return "done"

    gate.claim("busy", scope="s", fingerprint={"message[n]": 1})
    replies = [handle({"id": "a", "n": 1}), handle({"id": "a", "n": 1}), handle(message={"id": "busy", "n": 1})]
    assert replies == ["done", "done", None]
    # And what cannot run is logged: another payload, and no key
    assert handle({"id": "a", "n": 2}) is handle({"id": None, "n": 2}) is None
    assert len(ran) == 1
    assert counted(gate) == {"handled": 1, "duplicate": 1, "in_progress": 1, "rejected": 2}
    assert caplog.text.count("callback.failed") == 2


async def test_methods_of_each_kind_can_be_callbacks(gate: Gate) -> None:
    # Given callbacks that are methods, with the decorator above or below the one of the method
    class Shop:
        @gate.callback(key="{message}", scope="m")
        def method(self, message: str) -> str:
            return f"{type(self).__name__} {message}"

        @gate.callback(key="{message}", scope="ca")
        @classmethod
        def above_class(cls, message: str) -> str:
            return f"{cls.__name__} {message}"

        @classmethod
        @gate.callback(key="{message}", scope="cb")
        def below_class(cls, message: str) -> str:
            return f"{cls.__name__} {message}"

        @gate.callback(key="{message}", scope="sa")
        @staticmethod
        def above_static(message: str) -> str:
            return f"Shop {message}"

        @gate.callback(key="{message}", scope="as")
        @classmethod
        async def above_async(cls, message: str) -> str:
            return f"{cls.__name__} {message}"

    # When each gets a message twice, called on the object or on its class
    shop = Shop()
    callbacks: list[Any] = [
        shop.method, shop.above_class, Shop.above_class, shop.below_class, shop.above_static, Shop.above_static
    ]  # fmt: skip
    replies = [callback("m1") for callback in callbacks for _ in range(2)]
    replies += [await shop.above_async("m1"), await Shop.above_async("m1")]
    # Then the first copy ran, and the others got its result
    assert replies == ["Shop m1"] * 14
    assert counted(gate) == {"handled": 5, "duplicate": 9}


@pytest.mark.parametrize("on_failure", ["raise", "log"])
async def test_an_error_of_the_function_is_raised_or_logged(gate: Gate, caplog: Any, on_failure: Any) -> None:
    @gate.callback(key="{n}", scope="a", on_failure=on_failure)
    def handle(n: int) -> None:
        raise ValueError("broken")

    @gate.callback(key="{n}", scope="b", on_failure=on_failure)
    async def handle_async(n: int) -> None:
        raise ValueError("broken")

    if on_failure == "raise":
        with pytest.raises(ValueError, match="broken"):
            handle(1)
        with pytest.raises(ValueError, match="broken"):
            await handle_async(1)
    else:
        assert handle(1) is await handle_async(1) is None
        assert caplog.text.count("ValueError: broken") == 2
    assert counted(gate) == {"failed": 2}


async def test_a_store_that_is_away_is_logged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Gate(f"unix://{tmp_path}/absent.sock", timeout="10ms") as gate:

        @gate.callback(key="{n}")
        async def handle(n: int) -> int:
            return n

        assert await asyncio.gather(handle(1), handle(2)) == [None, None]
        assert counted(gate) == {"failed": 2}
        await gate.aio.close()
    assert "StoreUnavailable" in caplog.text


def test_a_settlement_that_is_not_awaited_is_an_error(gate: Gate) -> None:
    # Given a blocking callback whose `on_verdict` returns a coroutine that nothing awaits
    async def settle() -> None: ...

    @gate.callback(key="{n}", scope="s", on_verdict=lambda *_: settle())
    def handle(n: int) -> None: ...

    # When a message arrives, then the caller learns that it is not settled
    with pytest.raises(InvalidArgument, match="a plain function returned its coroutine"):
        handle(1)


def test_options_are_checked_at_decoration(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="on_failure"):
        gate.callback(key="{n}", on_failure="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="m"):
        gate.callback(key="{m}")(lambda n: n)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_lost_lease_is_logged_and_not_raised_into_the_loop(
    gate: Gate, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    # Given a callback whose key another caller takes over while it runs
    def lose(message: str) -> str:
        gate.forget(message, scope="s", force=True)
        gate.claim(message, scope="s")
        return "done"

    async def lose_async(message: str) -> str:
        return lose(message)

    callback: Any = gate.callback(key="{message}", scope="s", on_lost="raise")(lose_async if awaiting else lose)
    # When it returns, then the library's loop gets no error of the guard
    answer = callback("a")
    assert (await answer if awaiting else answer) is None
    assert counted(gate) == {"lost": 1}
    assert "outcome=lost" in caplog.text
