"""A worker that only takes: it uses a Membership as the protocol's docstring says. As a program, one to be killed:

python hand.py HOSTS PATH TTL      prints its name and what it is assigned, as JSON, at every change
"""

from __future__ import annotations

import asyncio
import json
import sys

from idemgate_zookeeper import ZooKeeperMembership

from idemgate import Gate

SLOTS = 64


class Hand:
    """`busy`: its handlers do not end by themselves; `finish` ends some."""

    def __init__(self, membership: ZooKeeperMembership, busy: bool = False) -> None:
        self.membership = membership
        self.busy = busy
        self.running: set[int] = set()
        self.stop = asyncio.Event()
        membership.on_change(self.work)
        self.task = asyncio.create_task(membership.run(self.stop, {"t": SLOTS}))

    def work(self) -> None:
        if self.busy:
            self.running |= self.membership.assigned_slots("t")
        self.membership.release("t", self.membership.draining("t") - self.running)

    def finish(self, slots: set[int]) -> None:
        self.running -= slots
        self.work()

    @property
    def assigned(self) -> frozenset[int]:
        return self.membership.assigned_slots("t")


async def main(hosts: str, path: str, ttl: str) -> None:
    hand = Hand(ZooKeeperMembership(Gate("redis://127.0.0.1:1"), hosts, path, ttl=ttl))

    def tell() -> None:
        print(json.dumps([hand.membership.member, sorted(hand.assigned)]), flush=True)

    hand.membership.on_change(tell)
    await hand.task


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
