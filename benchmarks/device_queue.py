"""A device that only takes time: a process that works through a queue of jobs, each so many seconds long.

It runs beside the host as an accelerator does, never in its interpreter, and accounts for itself by its own clock. Run
as a script it is the device; `DeviceQueue` is the host's end. Jobs are doubles in a pipe, which is the queue, and each
is answered with a byte when it is done.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_JOB = struct.Struct("<d")  # seconds; a negative number asks for the report
_REPORT = struct.Struct("<3d")
_DONE = b"\0"
# A sleep can be so much too long; the rest is waited for with open eyes.
_LAST_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTimes:
    """Seconds between the begin of the first job and the end of the last.

    Attributes:
      busy: a job ran.
      idle: the queue was empty.
      handoff: neither: a job was there and was being taken out, which a hardware queue does in no time.
    """

    busy: float
    idle: float
    handoff: float

    @property
    def active(self) -> float:
        """Fraction of the time in which it worked or could have; the hand-off is left out."""
        return self.busy / (self.busy + self.idle)


class DeviceQueue:
    """The host's end. One thread uses it; close it, or use it in a `with`.

    Attributes:
      num_jobs: put in so far.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.num_jobs = self._num_done = 0

    def __enter__(self) -> DeviceQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, seconds: float) -> int:
        """Adds a job; returns its number, from 1."""
        os.write(self._jobs, _JOB.pack(seconds))
        self.num_jobs += 1
        return self.num_jobs

    def is_done(self, job: int) -> bool:
        """Whether it is done; does not wait."""
        while self._num_done < job and select.select([self._answers], [], [], 0)[0]:
            self._read()
        return self._num_done >= job

    def wait(self, job: int) -> None:
        """Returns when it is done; other threads run meanwhile."""
        while self._num_done < job:
            self._read()

    def _read(self) -> None:
        done = os.read(self._answers, 4096)
        if not done:
            raise RuntimeError("the process that stands for the device has ended")
        self._num_done += len(done)

    def take_times(self) -> QueueTimes:
        """Its account since the last one, once every job is done."""
        self.wait(self.num_jobs)
        os.write(self._jobs, _JOB.pack(-1.0))
        busy, idle, handoff = _REPORT.unpack(os.read(self._answers, _REPORT.size))
        return QueueTimes(busy=busy, idle=idle, handoff=handoff)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(jobs: int, answers: int) -> None:
    """The device: takes jobs from one file descriptor until it is closed, answers to the other."""
    clock = time.perf_counter
    busy = idle = handoff = 0.0
    end: float | None = None
    while True:
        was_empty = not select.select([jobs], [], [], 0)[0]
        message = os.read(jobs, _JOB.size)
        begin = clock()
        if not message:
            return
        (seconds,) = _JOB.unpack(message)
        if seconds < 0:
            os.write(answers, _REPORT.pack(busy, idle, handoff))
            busy, idle, handoff, end = 0.0, 0.0, 0.0, None
            continue
        if end is not None and was_empty:
            idle += begin - end
        elif end is not None:
            handoff += begin - end
        _spend(begin + seconds)
        end = clock()  # before anybody can know
        busy += end - begin
        os.write(answers, _DONE)


def _spend(until: float) -> None:
    left = until - time.perf_counter() - _LAST_SECONDS
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < until:
        pass


if __name__ == "__main__":
    serve(sys.stdin.fileno(), sys.stdout.fileno())
