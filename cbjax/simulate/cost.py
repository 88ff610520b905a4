"""What a step costs, in seconds, from what it has to do.

A cost model is a function of a step's work. The linear one knows a base for each bucket, since a program computes its
whole bucket, padding included, and adds what depends on the data: rows, tokens, KV cells read, blocks moved. It comes
from measured steps, or from a machine's data sheet by `cbjax.simulate.roofline`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from cbjax.scheduler import Bucket, StepPlan

FORMAT = "cbjax.simulate.LinearCost/1"


class StepWork(NamedTuple):
    """What one dispatch does: a step, or a window of them.

    Attributes:
      bucket: the program that runs it.
      rows, tokens: in it that are not padding; of a window in all its steps together.
      kv_reads: KV cells of earlier steps that its rows read.
      offloaded, restored, copied: blocks moved to host memory, from there, and within the device.
      window: steps.
    """

    bucket: Bucket
    rows: int
    tokens: int
    kv_reads: int = 0
    offloaded: int = 0
    restored: int = 0
    copied: int = 0
    window: int = 1

    @classmethod
    def of(cls, plan: StepPlan, bucket: Bucket) -> StepWork:
        """The work of a plan in its bucket."""
        return cls(
            bucket=bucket,
            rows=plan.batch.num_rows if plan.batch.window == 1 else plan.batch.num_computed,
            tokens=plan.batch.num_computed,
            kv_reads=plan.batch.kv_reads,
            offloaded=sum(len(offload.blocks) for offload in plan.offloads),
            restored=sum(len(restore.blocks) for restore in plan.restores),
            copied=len(plan.copies),
            window=plan.batch.window,
        )


class CostModel(Protocol):
    """Anything that tells the seconds of a dispatch."""

    def seconds(self, work: StepWork) -> float:
        """Seconds from the plan to its answers, above 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantCost:
    """Every step takes as long: for studies of scheduling alone, in which a second is a step."""

    step: float = 1.0

    def seconds(self, work: StepWork) -> float:
        """`step` for each step, whatever the work."""
        return self.step * work.window


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds as a linear function of the work; every coefficient is in seconds and at least 0.

    Attributes:
      buckets: base of a step in each bucket.
      step, padded_token: base of a step in any other bucket, and per token that it has room for.
      row, token, kv_read: per row, per token that is not padding, per KV cell read.
      offloaded, restored, copied: per block moved.
      dispatch: of the host, once for all steps of a window.

    Raises:
      ValueError: a coefficient is negative or no number.
    """

    buckets: Mapping[Bucket, float] = field(default_factory=dict)
    step: float = 0.0
    padded_token: float = 0.0
    row: float = 0.0
    token: float = 0.0
    kv_read: float = 0.0
    offloaded: float = 0.0
    restored: float = 0.0
    copied: float = 0.0
    dispatch: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (*self._coefficients().items(), *((str(b), v) for b, v in self.buckets.items())):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a cost is a number of seconds, at least 0; got {value} for {name}")

    def seconds(self, work: StepWork) -> float:
        """Seconds of a dispatch.

        Raises:
          ValueError: nothing is known about its bucket.
        """
        base = self.buckets.get(work.bucket)
        if base is None:
            base = self.step + self.padded_token * work.bucket.tokens
        if not base:
            known = ", ".join(map(str, sorted(self.buckets))) or "none"
            raise ValueError(
                f"the cost model must have a base for every bucket; it lacks {work.bucket} and has {known}: "
                "make it for the same ladder, or give step or padded_token for other buckets"
            )
        return (
            self.dispatch
            + base * work.window
            + self.row * work.rows
            + self.token * work.tokens
            + self.kv_read * work.kv_reads
            + self.offloaded * work.offloaded
            + self.restored * work.restored
            + self.copied * work.copied
        )

    def _coefficients(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "buckets"}

    def to_json(self) -> str:
        """The model as text, which `from_json` reads."""
        buckets = [{**asdict(bucket), "seconds": seconds} for bucket, seconds in sorted(self.buckets.items())]
        return json.dumps({"format": FORMAT, **self._coefficients(), "buckets": buckets}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> LinearCost:
        """The model that `to_json` wrote.

        Raises:
          ValueError: it is no such text, of another format, or has other coefficients.
        """
        try:
            made = json.loads(text)
        except ValueError as error:
            raise ValueError(f"a cost model is JSON as LinearCost.to_json writes it; {error}") from None
        if not isinstance(made, dict) or made.get("format") != FORMAT:
            found = made.get("format") if isinstance(made, dict) else type(made).__name__
            raise ValueError(f"a cost model has the format {FORMAT!r}; got {found!r}: measure and write it anew")
        known = {f.name for f in fields(cls)}
        unknown = sorted(made.keys() - known - {"format"})
        if unknown:
            raise ValueError(f"a cost model has the coefficients {sorted(known)}; got {unknown}")
        numbers = {name: _number(name, value) for name, value in made.items() if name not in ("format", "buckets")}
        return cls(buckets=dict(map(_bucket, made.get("buckets", []))), **numbers)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a cost is a number of seconds; got {value!r} for {name}")
    return float(value)


def _bucket(entry: Any) -> tuple[Bucket, float]:
    if not isinstance(entry, dict) or entry.keys() != {"kind", "tokens", "rows", "seconds"}:
        raise ValueError(f"a bucket's cost has kind, tokens, rows and seconds; got {entry!r}")
    bucket = Bucket(kind=entry["kind"], tokens=entry["tokens"], rows=entry["rows"])
    return bucket, _number(str(bucket), entry["seconds"])
