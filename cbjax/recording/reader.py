"""Reads a recording; the format is the writer's."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from cbjax import __version__
from cbjax.recording.encoding import RecordingError, decode
from cbjax.recording.inputs import Input, Start
from cbjax.recording.writer import END, FORMAT_VERSION, sealed, to_text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Recording:
    """What a file holds.

    Attributes:
      name: of the file, for messages.
      made_by: version of cbjax.
      inputs: in order, the first one a `Start`.
      is_complete: it was closed. If not, whoever wrote it was killed, or still runs, or its disk was full.
      num_lost_bytes: of a last record that was not wholly written.
    """

    name: str
    made_by: str
    inputs: tuple[Input, ...]
    is_complete: bool = True
    num_lost_bytes: int = 0

    def __repr__(self) -> str:
        return f"Recording({self.name}: {len(self.inputs)} inputs{'' if self.is_complete else ', not closed'})"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know before trusting it, one sentence each; none if all is well."""
        notes = []
        if not self.is_complete:
            lost = f" and {self.num_lost_bytes} bytes of a record that is cut" if self.num_lost_bytes else ""
            notes.append(f"{self.name} was not closed: it has {len(self.inputs)} complete records{lost}")
        if self.made_by != __version__:
            notes.append(
                f"{self.name} was made by cbjax {self.made_by}; this is {__version__}, which may plan otherwise"
            )
        return tuple(notes)


def read_recording(path: str | PathLike[str]) -> Recording:
    """Reads all of a file.

    Raises:
      OSError: it cannot be read.
      RecordingError: it is no recording, one of another format version, or a record before the last one is damaged.
    """
    content, name = Path(path).read_bytes(), fspath(path)
    first, newline, rest = content.partition(b"\n")
    made_by = _made_by(first, is_whole=bool(newline), name=name)
    inputs: list[Input] = []
    place, ended, lost = len(first) + 1, False, 0
    for line in io.BytesIO(rest):
        number, text = len(inputs) + 1, line[9:-1]
        if not line.endswith(b"\n"):
            lost = len(line)
            break
        if ended or line != sealed(text, place):
            raise RecordingError(
                f"{name}: record {number} is damaged, or one before it was changed, added or taken out: this is not "
                "what was recorded"
            )
        ended = text == to_text(END)
        if not ended:
            inputs.append(_decoded(text, number, name))
        place += len(line)
    return Recording(name=name, made_by=made_by, inputs=tuple(inputs), is_complete=ended, num_lost_bytes=lost)


def _made_by(first: bytes, *, is_whole: bool, name: str) -> str:
    """The version of cbjax that wrote a file with this first line."""
    if not first:
        raise RecordingError(f"{name} is empty: nothing was recorded")
    try:
        what, version, made_by = json.loads(first)
    except (ValueError, TypeError, RecursionError):
        what = version = made_by = None
    if what != "cbjax recording" or not is_whole:
        raise RecordingError(f"{name} is no recording of cbjax: its first line does not say that it is one")
    if version != FORMAT_VERSION:
        raise RecordingError(
            f"{name} is a recording of format {version}, made by cbjax {made_by}; cbjax {__version__} reads format "
            f"{FORMAT_VERSION}: replay it with the version that made it"
        )
    return str(made_by)


def _decoded(text: bytes, number: int, name: str) -> Input:
    try:
        given = decode(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{name}: record {number} cannot be used: {error}") from error
    if number == 1 and not isinstance(given, Start):
        raise RecordingError(f"{name}: its first record is no start of a scheduler but a {type(given).__name__}")
    return given
