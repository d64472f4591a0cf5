"""Two workers divide the slots of a topic; one leaves, and the other takes over.

python example.py [hosts]        a ZooKeeper server has to be there; localhost:2181 unless said otherwise
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from idemgate_zookeeper import ZooKeeperMembership

from idemgate import Gate

TOPICS = {"images": 64}  # many more than workers: shares are random, and of 8 slots one of two workers may get none


class Taker:
    """Stands for a worker: it would take from what is assigned, and has nothing in flight that it must wait for."""

    def __init__(self, name: str, hosts: str) -> None:
        self.name = name
        self.membership = ZooKeeperMembership(Gate(namespace="example"), hosts, ttl="4s")
        self.membership.on_change(self.changed)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.membership.run(self.stop, TOPICS))

    @property
    def slots(self) -> int:
        return len(self.membership.assigned_slots("images"))

    def changed(self) -> None:
        self.membership.release("images", self.membership.draining("images"))
        print(f"{self.name} takes from {sorted(self.membership.assigned_slots('images'))}")


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what the servers and the other worker have to do first."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.05)


async def main(hosts: str) -> None:
    print("anna comes")
    anna = Taker("anna", hosts)
    await until(lambda: anna.slots == 64)
    print("boris comes")
    boris = Taker("boris", hosts)
    await until(lambda: 0 < boris.slots < 64 and anna.slots + boris.slots == 64)
    print("anna leaves")
    anna.stop.set()
    await anna.task
    await until(lambda: boris.slots == 64)
    boris.stop.set()
    await boris.task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:2181"))
