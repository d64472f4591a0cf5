"""A topic whose policy nobody has told is opened by many at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from idemgate import Gate


async def test_many_may_use_a_topic_first(face: Any) -> None:
    # Given a topic that nobody has made, nor said a policy for
    topic = face.topic("t")
    # When many use it at once
    answers = await asyncio.gather(*(topic.trigger(n) for n in range(16)))
    # Then each has its answer
    assert {one.status for one in answers} == {"scheduled"}


def test_one_is_told_of_it_when_another_has_begun_to_make_it(gate: Gate) -> None:
    # Given two threads that were both told that there is no such topic
    topic, told = gate.topic("t"), threading.Barrier(2)
    definition = topic.definition
    answer = gate.context.link.run(definition.open_call())
    ended: list[bool] = []

    def hear() -> None:
        told.wait(30)
        ended.append(definition.apply_open_reply(answer))

    threads = [threading.Thread(target=hear) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    # Then both ask once more
    assert ended == [False, False]
    assert topic.trigger("k").status == "scheduled"
