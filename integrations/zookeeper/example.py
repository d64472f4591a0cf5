"""Two workers divide the slots of a topic; one leaves, and the other takes over.

python example.py [hosts]        a ZooKeeper server has to be there; localhost:2181 unless said otherwise
"""

from __future__ import annotations

import asyncio
import sys

from idemgate_zookeeper import ZooKeeperMembership

from idemgate import Gate

TOPICS = {"images": 8}


class Taker:
    """Stands for a worker: it would take from what is assigned, and has nothing in flight that it must wait for."""

    def __init__(self, name: str, hosts: str) -> None:
        self.name = name
        self.membership = ZooKeeperMembership(Gate(namespace="example"), hosts, ttl="4s")
        self.membership.on_change(self.changed)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.membership.run(self.stop, TOPICS))

    def changed(self) -> None:
        self.membership.release("images", self.membership.draining("images"))
        print(f"{self.name} takes from {sorted(self.membership.assigned('images'))}")


async def main(hosts: str) -> None:
    print("anna comes")
    anna = Taker("anna", hosts)
    await asyncio.sleep(1)
    print("boris comes")
    boris = Taker("boris", hosts)
    await asyncio.sleep(2)
    print("anna leaves")
    anna.stop.set()
    await anna.task
    await asyncio.sleep(1)
    boris.stop.set()
    await boris.task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:2181"))
