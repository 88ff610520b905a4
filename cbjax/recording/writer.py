"""Writes a recording: text lines, each complete and on its way to the disk before the engine goes on.

The first line says what the file is. Each further one is a record: eight hex digits of a checksum, a blank, and an
input as JSON; the last one is `end`. The checksum is the CRC-32 of the JSON text, continued from the record's place in
the file, so a record that was changed, or comes after one that was taken out, is noticed. A line is one write to the
file: a process that is killed leaves every record that came before, and an interrupt cannot fall into one.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from io import FileIO
from os import PathLike

from cbjax import __version__
from cbjax.recording.encoding import encode
from cbjax.recording.inputs import Input

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
END = ["end"]


class RecordingWriter:
    """A journal that writes to a file; see the module's docstring. An existing file is replaced.

    A full disk ends the recording, not the run that it records: it is logged, and what was written stays readable.

    Raises:
      OSError: the file cannot be made.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._lock = threading.Lock()  # whoever closes it need not be who runs the engine
        self._file: FileIO | None = FileIO(path, "w")
        self._put(header())

    def __call__(self, given: Input) -> None:
        """Writes one record; once closed, does nothing.

        Raises:
          ValueError: a config has a part that cannot be written.
        """
        text = to_text(encode(given))
        with self._lock:
            self._put_record(text)

    def close(self, *, is_complete: bool = True) -> None:
        """Closes the file, with an end if it `is_complete`; a recording without one says so when it is read."""
        with self._lock:
            if is_complete:
                self._put_record(to_text(END))
            self._give_up()

    def _put_record(self, text: bytes) -> None:
        if self._file is not None:
            self._put(sealed(text, self._file.tell()))

    def _put(self, line: bytes) -> None:
        assert self._file is not None
        try:
            if self._file.write(line) == len(line):
                return
            problem: object = "the disk is full"
        except OSError as error:
            problem = error
        log.error("the recording %s ends early, and the run goes on: %s", self._file.name, problem)
        self._give_up()

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def to_text(document: list) -> bytes:
    """JSON without blanks, all ASCII."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def sealed(text: bytes, place: int) -> bytes:
    """The line of a record that begins `place` bytes into the file."""
    return b"%08x %s\n" % (zlib.crc32(text, place & 0xFFFFFFFF), text)


def header() -> bytes:
    """The first line of a file."""
    return to_text(["cbjax recording", FORMAT_VERSION, __version__]) + b"\n"
