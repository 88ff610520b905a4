"""The compiler's own listing of a kernel, read as a tree of loops.

libtpu writes the final instruction bundles of each program as text, one bundle a line, with a `>` for each loop that it
is in. A bundle is what a TPU core issues in one cycle; waits for copies and stalls are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s*(LB|LE|PB|PF|CT|LH)?:\s*(>*)\s*\{")
_SPILL = re.compile(r"= vst[.\w]* \[vmem:\[#allocation\d+_spill")
_FILL = re.compile(r"= vld[.\w]* \[vmem:\[#allocation\d+_spill")


@dataclass(slots=True)
class Loop:
    """A loop's own bundles, and the loops in it in the order of the program; the program itself is the outermost.

    Attributes:
      bundles: not those of inner loops.
      spills: vector registers stored because there are too few; `fills` reads them back.
    """

    bundles: int = 0
    spills: int = 0
    fills: int = 0
    loops: list[Loop] = field(default_factory=list)

    def total(self, trips: Sequence[Trips]) -> float:
        """Bundles issued in all, where the loops make these trips.

        Raises:
          ValueError: the compiler made other loops than are told of.
        """
        if len(trips) != len(self.loops):
            raise ValueError(
                f"the compiled program has {len(self.loops)} loops where {len(trips)} were written: {self.describe()}"
            )
        inner = (trip.count * loop.total(trip.loops) for trip, loop in zip(trips, self.loops, strict=True))
        return self.bundles + sum(inner)

    def describe(self) -> str:
        """Bundles of each loop, as nested brackets."""
        return (
            f"{self.bundles}[{', '.join(loop.describe() for loop in self.loops)}]" if self.loops else f"{self.bundles}"
        )

    def walk(self) -> list[Loop]:
        """This loop and all in it."""
        return [self, *(each for loop in self.loops for each in loop.walk())]


@dataclass(frozen=True, slots=True)
class Trips:
    """How often a loop is run each time it is come to, on average, and the same of the loops in it."""

    count: float
    loops: tuple[Trips, ...] = ()


def parse(listing: str) -> Loop:
    """The loops of a listing of final bundles.

    Only labelled lines tell where a loop begins (`LB`) and where it is over (a label of less depth): branches and empty
    bundles are written with fewer `>` than their loop has.
    """
    open_loops = [Loop()]
    for line in listing.splitlines():
        found = _BUNDLE.match(line)
        if not found:
            continue
        label, depth = found.group(1), len(found.group(2))
        if label == "LB":
            del open_loops[depth:]
            assert len(open_loops) == depth, f"a loop of depth {depth} begins in one of {len(open_loops) - 1}: {line}"
            open_loops[-1].loops.append(Loop())
            open_loops.append(open_loops[-1].loops[-1])
        elif label is not None:
            del open_loops[depth + 1 :]
        loop = open_loops[-1]
        loop.bundles += 1
        loop.spills += len(_SPILL.findall(line))
        loop.fills += len(_FILL.findall(line))
    return open_loops[0]


def listings(folder: Path) -> dict[str, Path]:
    """The listings in a folder that libtpu dumped to, by the program's name."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name = re.fullmatch(r"\d+-(.*?)-\d+-final_bundles\.txt", path.name)
        if name:
            found[name.group(1)] = path
    return found
