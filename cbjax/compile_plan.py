"""The compile plan: every program that an engine can come to need, before any is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbjax.descriptor import Bucket
from cbjax.program_store import StoredProgram
from cbjax.programs import OTHER_PROGRAMS, ModelDevice, Program, ProgramKey

# In this process: compiled, or read from disk. Not in it: on disk (found without tracing), or nowhere.
STATUSES = ("compiled", "read", "on disk", "to compile")
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProgram:
    """One program.

    Attributes:
      name, purpose, sizes: for people.
      status: one of `STATUSES`.
      seconds: that tracing and compiling took, or if it was read in this process, reading; None: not known yet.
      temp_bytes: temporaries by the compiler's own analysis; None: not known yet.
    """

    name: str
    purpose: str
    sizes: str
    status: str
    seconds: float | None
    temp_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """All programs; `str` is a table.

    Attributes:
      cache: where compiled programs are kept between processes.
    """

    programs: tuple[PlannedProgram, ...]
    cache: str

    def __len__(self) -> int:
        return len(self.programs)

    def count(self, status: str) -> int:
        """Programs of that status."""
        return sum(program.status == status for program in self.programs)

    def __str__(self) -> str:
        rows = [("program", "for", "sizes", "status", "seconds", "temporaries")]
        rows += [
            (p.name, p.purpose, p.sizes, p.status, _told(p.seconds, "{:.2f}"), _temporaries(p.temp_bytes))
            for p in self.programs
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        counts = [f"{n} {status}" for status in STATUSES if (n := self.count(status))]
        spent = sum(program.seconds or 0.0 for program in self.programs if program.status in STATUSES[:2])
        lines.append(
            f"{len(self)} programs: {', '.join(counts)}; {spent:.1f} s in all, side by side or not; cache: {self.cache}"
        )
        return "\n".join(lines)


def plan_programs(device: ModelDevice, buckets: Sequence[Bucket], *, cache: str) -> CompilePlan:
    """The plan of an engine with these buckets; compiles and traces nothing."""
    return CompilePlan(programs=tuple(_planned(device, key) for key in device.all_keys(buckets)), cache=cache)


def _planned(device: ModelDevice, key: ProgramKey) -> PlannedProgram:
    known = device.known(key)
    if isinstance(key, Bucket):
        name, sizes = str(key), f"{key.tokens} tokens, {key.rows} rows"
        many = "a token each of up to" if key.kind == "decode" else "prompts, and decodes beside them, up to"
        purpose = f"{many} {key.rows} rows" if key.kind == "decode" else f"{many} {key.tokens} tokens"
    else:
        name, purpose = OTHER_PROGRAMS[key]
        sizes = device.sizes(key)
    return PlannedProgram(
        name=name,
        purpose=purpose,
        sizes=sizes,
        status=_status(known),
        seconds=None if known is None else known.seconds,
        temp_bytes=None if known is None else known.temp_bytes,
    )


def _status(known: Program | StoredProgram | None) -> str:
    if isinstance(known, Program):
        return "read" if known.from_disk else "compiled"
    return "to compile" if known is None else "on disk"


def _told(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _temporaries(num_bytes: int | None) -> str:
    return _told(None if num_bytes is None else num_bytes / _MIB, "{:,.1f} MiB")
