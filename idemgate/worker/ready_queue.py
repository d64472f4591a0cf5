"""Queue of unstarted deliveries from which the topics of a worker take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idemgate.worker.consumer import InFlight, TopicConsumer

__all__ = ["ReadyQueue"]


class _TopicQueue:
    """The unstarted deliveries of one topic. `turn` is the number of its last turn."""

    __slots__ = ("entries", "turn")

    def __init__(self) -> None:
        self.entries: deque[InFlight] = deque()
        self.turn = 0


class ReadyQueue:
    """The unstarted deliveries of one kind of handler, one queue for each topic.

    The topic whose last turn is the longest ago is next. So a topic with many slow deliveries delays another topic by
    one turn only. Any thread may call `popleft`.
    """

    __slots__ = ("_by_consumer", "_queues", "_turn", "popleft")
    popleft: Callable[[], InFlight]
    """Remove and return the oldest delivery of the next topic that has one. Raises IndexError without any."""

    def __init__(self) -> None:
        self._by_consumer: dict[TopicConsumer, _TopicQueue] = {}
        self._queues: tuple[_TopicQueue, ...] = ()
        self._turn = 0
        self.popleft = self._popleft_in_turn

    def of(self, consumer: TopicConsumer) -> deque[InFlight]:
        """Return the queue of one topic. Call it from the event loop only."""
        queue = self._by_consumer.get(consumer)
        if queue is None:
            queue = self._by_consumer[consumer] = _TopicQueue()
            self._queues = (*self._queues, queue)
            # Called for each delivery: with one topic, without a call in between.
            self.popleft = self._popleft_in_turn if len(self._queues) > 1 else queue.entries.popleft
        return queue.entries

    def _popleft_in_turn(self) -> InFlight:
        for queue in sorted(self._queues, key=_turn_of):
            try:
                entry = queue.entries.popleft()
            except IndexError:  # empty, or another thread took the last one
                continue
            self._turn = queue.turn = self._turn + 1
            return entry
        raise IndexError("no delivery is ready")

    def __len__(self) -> int:
        return sum(len(queue.entries) for queue in self._queues)

    def __bool__(self) -> bool:
        for queue in self._queues:  # noqa: SIM110 - asked at each end of a handler; `any` costs three times as much
            if queue.entries:
                return True
        return False

    def __iter__(self) -> Iterator[deque[InFlight]]:
        """Iterate over the queues of the topics."""
        return (queue.entries for queue in self._queues)


_turn_of = attrgetter("turn")
