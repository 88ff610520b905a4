"""Who was in which slot from when to when."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from cbjax.requests import RequestState
from cbjax.step_record import StepRecord


@dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """A request in a slot, from an admission to its end or eviction. Times are seconds on the timeline's clock.

    Attributes:
      request_id: whose.
      slot: which place of the running ones it had.
      incarnation: how many times it was admitted before.
      begin, end: `end` is None while it is there.
      first_token: its first output token of this stay; None if none came.
      num_cached: tokens that were not computed, since the prefix cache or a running request had their KV.
      num_tokens: output tokens of the request; known at its end.
      outcome: "stop", "length", "failed", "cancelled", "soft reset", "offload"; None while it is there.
      waited: seconds in the waiting line before its first step; known at the end of the first stay.
    """

    request_id: str
    slot: int
    incarnation: int
    begin: float
    num_cached: int
    end: float | None = None
    first_token: float | None = None
    num_tokens: int | None = None
    outcome: str | None = None
    waited: float | None = None


class StayTrack:
    """Attributes:
    ended: the last ones, as many as `limit`.
    num_ended: how many there were.
    """

    def __init__(self, limit: int) -> None:
        self.ended: deque[Stay] = deque(maxlen=limit)
        self.num_ended = 0
        self._open: dict[int, Stay] = {}  # by uid; at most one for each slot
        self._silent: set[int] = set()  # of those, who had no token yet

    def dispatched(self, record: StepRecord, now: float) -> None:
        """Evictions first: their slots may be taken by the same plan."""
        plan = record.plan
        for reset in plan.soft_resets:
            self._close(reset.uid, now, "soft reset")
        for offload in plan.offloads:
            self._close(offload.uid, now, "offload")
        for admission in plan.admitted:
            self._silent.add(admission.uid)
            self._open[admission.uid] = Stay(
                request_id=record.request_ids[admission.uid],
                slot=admission.slot,
                incarnation=admission.incarnation,
                begin=now,
                num_cached=admission.num_cached,
            )

    def answered(self, uids: np.ndarray, now: float) -> None:
        """Each has output tokens more. Only first tokens are news; the others are counted at the end."""
        if self._silent:
            for uid in self._silent.intersection(uids.tolist()):
                self._open[uid].first_token = now
                self._silent.discard(uid)

    def request_ended(self, request: RequestState, now: float) -> None:
        """Whoever was admitted before anyone watched has no stay."""
        stay = self._close(request.uid, now, request.finish_reason or "failed")
        if stay is not None:
            stay.num_tokens = len(request.generated_tokens)
            if not stay.incarnation and request.started is not None:
                stay.waited = request.started - request.created

    def _close(self, uid: int, now: float, outcome: str) -> Stay | None:
        stay = self._open.pop(uid, None)
        if stay is not None:
            self._silent.discard(uid)
            stay.end, stay.outcome = now, outcome
            self.ended.append(stay)
            self.num_ended += 1
        return stay

    def all(self) -> list[Stay]:
        """Those that ended, and those that are there."""
        return [*self.ended, *self._open.values()]
