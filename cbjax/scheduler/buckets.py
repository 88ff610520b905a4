"""The shapes that a step can be padded to, as values; which there are is the ladder's (`cbjax.ladder`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cbjax.scheduler.plan import Batch


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bucket:
    """The shapes of one program.

    Attributes:
      kind: "decode", one token per row and token i is row i's, for as many steps as the batch's window has; or
        "mixed", one step of rows of any length packed one after another.
      tokens, rows: capacities; equal for "decode".
    """

    kind: Literal["decode", "mixed"]
    tokens: int
    rows: int

    def __str__(self) -> str:
        return f"decode({self.rows})" if self.kind == "decode" else f"mixed({self.tokens} tokens, {self.rows} rows)"

    def fits(self, batch: Batch) -> bool:
        """Whether the batch can be padded to this bucket."""
        if batch.num_rows > self.rows or batch.num_tokens > self.tokens:
            return False
        return batch.window == 1 if self.kind == "mixed" else batch.num_tokens == batch.num_rows
