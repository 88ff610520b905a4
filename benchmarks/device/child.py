"""The process in which the steps of one part run: `python -m benchmarks.device.child MODULE FILE --seconds N`.

It goes on where the file says that another one came to, and ends with code 1 when the device answers no more, so that
the next one starts afresh.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.device.state import State, Step

# A step that begins with less left would hardly end.
LEAST_SECONDS = 3.0


def run_steps(steps: Sequence[Step], state: State, seconds: float) -> bool:
    """Runs what the state has not; False: the device answers no more."""
    deadline = time.monotonic() + seconds
    for step in steps:
        if step.name in state.steps:
            continue
        if deadline - time.monotonic() < LEAST_SECONDS:
            state.leave_out(step.name, f"no time was left of the part's {seconds:.0f} s")
        elif not state.run(step) and not answers():
            return False
    return True


def answers() -> bool:
    """Whether the device still computes; after a kernel's fault it does not."""
    import jax
    import jax.numpy as jnp

    try:
        return float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2.0
    except Exception:  # whatever it raises, it is of no use any more
        return False


def end_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, however that comes: a kernel that hangs holds the card."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.device.child")
    options.add_argument("module")
    options.add_argument("file", type=Path)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("--peer-python", default=sys.executable)
    options.add_argument("--attention", default=None)
    args = options.parse_args(argv)
    end_with_parent()
    state = State(args.file)
    part = importlib.import_module(args.module)
    steps = part.steps(args)
    if "machine" not in state.data:
        state.data |= {"machine": report.machine(), "versions": report.versions()}
        state.save()
    return 0 if run_steps(steps, state, args.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
