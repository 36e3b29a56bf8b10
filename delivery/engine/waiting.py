"""Requests that wait for admission: a priority queue, and a wait queue that gathers a batch. No torch.

The priority queue orders by priority, then arrival; a request rises one level for every `ageing_s`
that it has waited, so none waits for ever. The wait queue is the head of that order: it is opened when
the oldest request has waited `wait_time_s`, or when enough prompt tokens are there to fill a step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from delivery.engine.request import PRIORITIES, Request, Status


class WaitingQueue:
    """Waiting requests by class, oldest first. All times are seconds of one monotonic clock."""

    def __init__(self, *, wait_time_s: float = 0.005, ageing_s: float = 10.0) -> None:
        self.wait_time_s = wait_time_s
        self.ageing_s = ageing_s
        self.prompt_tokens = 0
        self._classes: dict[int, list[Request]] = {priority: [] for priority in PRIORITIES}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Request]:
        for requests in self._classes.values():
            yield from requests

    def add(self, request: Request) -> None:
        """A new request, or one that was preempted and keeps its old place."""
        insort(self._classes[request.priority], request, key=lambda r: r.arrival_s)
        self.prompt_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Raises ValueError when it does not wait."""
        self._classes[request.priority].remove(request)
        self.prompt_tokens -= request.num_tokens

    def level(self, request: Request, now_s: float) -> int:
        """Its priority, risen by age: never above the highest one, where the older goes first."""
        risen = int(max(0.0, now_s - request.arrival_s) / self.ageing_s)
        return max(PRIORITIES[0], request.priority - risen)

    def first(self, now_s: float) -> Request | None:
        """Who is next."""
        heads = [requests[0] for requests in self._classes.values() if requests]
        return min(heads, key=lambda r: (self.level(r, now_s), r.arrival_s), default=None)

    def is_open(self, now_s: float, batch_tokens: int) -> bool:
        """Whether waiting requests may be admitted now; batch_tokens: prompt tokens that fill a step."""
        return self.opens_at(batch_tokens) <= now_s

    def opens_at(self, batch_tokens: int) -> float:
        """When the wait queue opens if nothing else arrives; +inf when nothing waits."""
        heads = [requests[0] for requests in self._classes.values() if requests]
        if not heads:
            return float("inf")
        if self.prompt_tokens >= batch_tokens or any(r.status is Status.PREEMPTED for r in heads):
            return 0.0
        return min(r.arrival_s for r in heads) + self.wait_time_s
