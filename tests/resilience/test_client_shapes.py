"""What a client may be like: one that retries, one with a pool of one connection, one whose connections never
come to be or fall silent; and programs of many event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from idemgate import AlreadyInProgress, Gate, StoreUnavailable
from idemgate.lua import script
from idemgate.testing.proxy import Proxy

SCRIPT = b"EVALSHA"
TROUBLE = [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError]


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with Proxy(url) as made:
        yield made


@pytest.fixture
def unreachable() -> Iterator[str]:
    """Where connecting never ends: the queue of a listener who accepts nobody is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        for one in waiting:
            one.close()


def retrying(port: int, awaiting: bool) -> Any:
    """A client as a user may have it: ten tries of redis-py's own for everything."""
    if awaiting:
        return aredis.Redis(port=port, retry=AsyncRetry(ConstantBackoff(0.001), 10), retry_on_error=TROUBLE)
    return redis.Redis(port=port, retry=Retry(ConstantBackoff(0.001), 10), retry_on_error=TROUBLE)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_retries_of_a_users_client_run_no_request_twice_with_two_effects(
    awaiting: bool, proxy: Proxy, namespace: str, sound: Any, record_fault: Callable[..., None]
) -> None:
    # Given a gate of a client that retries, through which every second reply gets lost
    client = retrying(proxy.port, awaiting)
    gate = Gate(client, namespace=namespace)
    topic, ran, n = gate.topic("t", merge="append"), list[str](), 0

    @gate.once(key="{key}", scope="s")
    async def charge(key: str) -> str:
        ran.append(key)
        return key

    await topic.aio.open()
    before = proxy.count(SCRIPT)
    for n in range(1, 11):
        # When everything is asked once
        proxy.cut_reply(SCRIPT, times=2)
        assert await charge(f"k{n}") == f"k{n}"
        proxy.cut_reply(SCRIPT)
        assert (await topic.aio.trigger("key", n)).accepted
        proxy.cut_reply(SCRIPT)
        (delivery,) = await topic.aio.take(10)
        assert (delivery.payload, delivery.attempt) == ([n], 1)
        proxy.cut_reply(SCRIPT)
        assert await topic.aio.ack(delivery) == "ok"
    # Then each had one effect, and was sent once for each reply that was lost, and no more often
    assert ran == [f"k{n}" for n in range(1, 11)]
    stats = await topic.aio.stats()
    assert (stats["accepted"], stats["taken"], stats["acked"]) == (10, 10, 10)
    # (a machine that takes seconds for this also registers the scope)
    of_heartbeat = sum(proxy.count(script(name).sha) for name in ("guard/renew", "guard/register"))
    assert proxy.count(SCRIPT) - before - of_heartbeat == 10 * (5 + 5) + 1
    record_fault("reply lost to a client with retries of its own", 50, promises="P2 P6", effects_twice=0)
    await gate.aio.close()
    gate.close()
    sound(gate)
    if awaiting:
        await client.aclose()


def test_64_threads_share_a_pool_of_one_connection(
    proxy: Proxy, namespace: str, sound: Any, many: Callable[[int], int], record_fault: Callable[..., None]
) -> None:
    keys = min(many(10), 100)
    # Given a gate of a client whose pool has one connection, and waits for it
    pool = redis.BlockingConnectionPool(port=proxy.port, max_connections=1, timeout=1)
    gate, ran, wrong = Gate(redis.Redis.from_pool(pool), namespace=namespace), list[str](), list[object]()

    @gate.once(key="{key}", scope="s", on_in_progress="wait")
    def charge(key: str) -> str:
        ran.append(key)
        assert gate.first(f"{key} inside", "1h")  # a call from within a call needs a connection too
        return key

    def work() -> None:
        for n in range(keys):
            if (found := charge(f"k{n}")) != f"k{n}":
                wrong.append(found)

    # When 64 threads call at once
    threads = [threading.Thread(target=work, daemon=True) for _ in range(64)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    # Then all get through, and each key ran once
    assert not any(one.is_alive() for one in threads)
    assert (sorted(ran), wrong) == (sorted(f"k{n}" for n in range(keys)), [])
    record_fault("64 threads share a pool of one connection", keys, promises="P1 P2", wrong_answers=0)
    gate.close()
    sound(gate)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_one_gate_serves_loop_after_loop_and_loops_in_threads(url: str, namespace: str, sound: Any) -> None:
    # Given one gate, whose function is guarded once for all loops
    gate, ran, answers = Gate(url, namespace=namespace), list[str](), list[list[str]]()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    @gate.once(key="{key}", scope="s", on_in_progress="wait")
    async def charge(key: str) -> str:
        ran.append(key)
        await asyncio.sleep(0)
        return key

    async def work() -> list[str]:
        """It leaves its connections to the end of its loop, as most programs do."""
        return await asyncio.gather(*(charge(f"k{n}") for n in range(20)))

    def live() -> None:
        for _ in range(5):
            answers.append(asyncio.run(work()))

    # When loops follow each other, in four threads
    threads = [threading.Thread(target=live, daemon=True) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    # Then each was answered, and each key ran once in all of them
    assert answers == [[f"k{n}" for n in range(20)]] * 20
    assert sorted(ran) == sorted(f"k{n}" for n in range(20))
    # And what belonged to the loops that ended goes when the next one comes

    async def last() -> None:
        await gate.aio.first("last", "1h")
        await gate.aio.close()

    asyncio.run(last())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 10  # noqa: PTH208
    gate.close()
    sound(gate)


@pytest.mark.unaudited("no server was ever reached")
@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_connection_that_never_comes_to_be_is_given_up_and_nothing_was_asked(
    awaiting: bool, unreachable: str, record_fault: Callable[..., None]
) -> None:
    gate = Gate(unreachable, timeout="200ms")
    async with asyncio.timeout(60):
        for ask in (
            lambda: gate.aio.first("k", "1h") if awaiting else asyncio.to_thread(gate.first, "k", "1h"),
            lambda: gate.aio.topic("t").trigger("k") if awaiting else asyncio.to_thread(gate.topic("t").trigger, "k"),
        ):
            with pytest.raises(StoreUnavailable) as told:
                await ask()
            assert told.value.executed == "no"
    await gate.aio.close()
    gate.close()
    record_fault("connecting never ends", 2, promises="P15")


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_waiting_caller_gets_an_error_when_the_store_stops_answering(
    awaiting: bool, url: str, proxy: Proxy, namespace: str, sound: Any, record_fault: Callable[..., None]
) -> None:
    # Given a key that another owner holds, and callers who wait for it, until the store does not answer any more
    with Gate(url, namespace=namespace) as others:
        owner = others.claim("k", scope="s", lease="1h")
        impatient, patient = (Gate(proxy.url, namespace=namespace, timeout=timeout) for timeout in ("200ms", "60s"))

        def guard(gate: Gate) -> Any:
            @gate.once(key="{key}", scope="s", on_in_progress="wait", wait="500ms")
            def charge(key: str) -> str:
                return key

            @gate.once(key="{key}", scope="s", on_in_progress="wait", wait="500ms")
            async def charge_async(key: str) -> str:
                return key

            return lambda: charge_async("k") if awaiting else asyncio.to_thread(charge, "k")

        fails_soon, goes_on = guard(impatient), guard(patient)
        async with asyncio.timeout(100):
            with pytest.raises(AlreadyInProgress):
                await goes_on()
            proxy.black_hole = True
            # Then a caller gets an error when its time is over
            with pytest.raises(StoreUnavailable):
                await fails_soon()
            # And when the store answers again, and the owner is done, callers get its result
            proxy.heal()
            assert owner.complete("theirs")
            assert await goes_on() == "theirs"
        for gate in (impatient, patient):
            await gate.aio.close()
            gate.close()
        sound(others)
    record_fault("black hole while waiting for another owner", 1, promises="P15")
