"""All parts of the check of a GPU, each in processes of its own that are ended when they hang; one JSON at the end.

Run by gpu_check.sh, which says more. The parts take their turns in the order of `PARTS`; what one leaves of its time
goes to those behind it. The JSON is that of every benchmark (`benchmarks.report`), its figures named "PART: STEP:
FIGURE", with `parts` beside it: by part the state of `benchmarks.device.state`, `seconds`, `status` ("ok" or "failed")
and `error`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.device.state import State

# Of all parts together, and what a process may take before its first step: importing, and waking the device.
SECONDS = 465.0
START_SECONDS = 60.0
POLL_SECONDS = 0.1
SAID_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Steps that belong together.

    Attributes:
      name: and that of its module.
      seconds: that it may take.
      environment: of its processes; "{folder}" stands for a folder of its own.
      package: where the module is.
    """

    name: str
    seconds: float
    package: str = "benchmarks.device"
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part(name="kernels", seconds=85.0),
    Part(name="bandwidth", seconds=95.0),
    Part(name="prefill", seconds=45.0),
    Part(
        name="command_buffer",
        seconds=40.0,
        environment={"XLA_FLAGS": "--xla_dump_to={folder} --xla_dump_hlo_module_re=.*step.*"},
    ),
    # Its peer needs a place on the card, too.
    Part(name="engine", seconds=200.0, environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
)


def run_part(part: Part, folder: Path, seconds: float, options: Sequence[str]) -> dict[str, Any]:
    """Runs a part to its end or that of its time, in as many processes as it takes."""
    start = time.monotonic()
    folder.mkdir(parents=True)
    path, log = folder / "state.json", folder / "log.txt"
    error = ""
    with log.open("wb") as said:
        while not error:
            left = start + seconds - time.monotonic()
            how = _run_once(part, path, said, left, options)
            if how is None:
                break
            state = State(path)
            running = [name for name, step in state.steps.items() if step["status"] == "running"]
            why = f"{how}; it said: {_end_of(log)}"
            for name in running:
                state.end(name, "failed", time.perf_counter(), error=why)
            if not running or start + seconds - time.monotonic() < report_margin(seconds):
                error = "" if running else why
                break
    found = State(path).data
    failed = [name for name, step in found["steps"].items() if step["status"] == "failed"]
    if not found["steps"] and not error:
        error = "no step was run"
    status = "failed" if failed or error else "ok"
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "error": error, **found}


def report_margin(seconds: float) -> float:
    """Less than this is not worth another process."""
    return min(15.0, seconds / 4)


def _run_once(part: Part, path: Path, said: Any, seconds: float, options: Sequence[str]) -> str | None:
    """One process; None: it ended well, else how it ended."""
    environment = dict(os.environ)
    for name, value in part.environment.items():
        given = [environment[name]] if name == "XLA_FLAGS" and environment.get(name) else []
        environment[name] = " ".join([*given, value.format(folder=path.parent / "dump")])
    if "--dry-run" in options:
        environment["JAX_PLATFORMS"] = "cpu"
    command = [
        sys.executable,
        "-m",
        "benchmarks.device.child",
        f"{part.package}.{part.name}",
        str(path),
        "--seconds",
        f"{seconds:.1f}",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return _watch(process, path, seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own group, which holds what it started, too
            process.wait()


def _watch(process: subprocess.Popen, path: Path, seconds: float) -> str | None:
    """Waits for the process's end, or for the end of its step's time or of its own; None: it ended well."""
    deadline, news, allowed = time.monotonic() + seconds, time.monotonic(), START_SECONDS
    seen = path.stat().st_mtime_ns if path.exists() else 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if path.exists() and (changed := path.stat().st_mtime_ns) != seen:
            seen, news = changed, now
            limits = [step["limit"] for step in State(path).steps.values() if step["status"] == "running"]
            allowed = max(limits, default=START_SECONDS)
        if now > deadline:
            return f"the part's time was over ({seconds:.0f} s)"
        if now - news > allowed:
            return f"its step's time was over ({allowed:.0f} s)"
    return None if process.returncode == 0 else f"the process ended with code {process.returncode}"


def _end_of(log: Path) -> str:
    return log.read_bytes()[-SAID_CHARACTERS:].decode(errors="replace").strip()


def document(argv: Sequence[str], args: argparse.Namespace, parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The JSON."""
    figures, limits, notes = {}, {}, []
    for name, part in parts.items():
        for step, found in part["steps"].items():
            figures |= {f"{name}: {step}: {key}": value for key, value in found.get("figures", {}).items()}
            limits |= {f"{name}: {step}: {key}": value for key, value in found.get("limits", {}).items()}
            if found["status"] != "ok":
                notes.append(f"{name}: {step}: {found['status']}: {found.get('error', '')}")
        notes += [f"{name}: {note}" for note in [*part["notes"], *[part["error"]] * bool(part["error"])]]
    known = [part for part in parts.values() if "machine" in part]
    return {
        "benchmark": "device.check",
        "command": shlex.join(["python", "-m", "benchmarks.device.check", *argv]),
        "machine": known[0]["machine"] if known else {},
        "versions": known[0]["versions"] if known else {},
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "figures": figures,
        "limits": limits,
        "notes": notes,
        "parts": dict(parts),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="bash benchmarks/device/gpu_check.sh", description=__doc__.split("\n")[0])
    names = [part.name for part in PARTS]
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="default gpu_check.json, of a dry run gpu_check_dry_run.json"
    )
    options.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU; the figures mean nothing")
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    options.add_argument("--seconds", type=float, default=SECONDS, help="for all parts (default %(default)s)")
    options.add_argument(
        "--attention",
        choices=["pallas", "xla", "eager"],
        help="attn_implementation of the engine (default: what it takes by itself)",
    )
    args = options.parse_args(argv)
    args.json = args.json or Path("gpu_check_dry_run.json" if args.dry_run else "gpu_check.json")
    if not os.access(args.json if args.json.exists() else args.json.absolute().parent, os.W_OK) or args.json.is_dir():
        options.error(f"--json must name a file that can be written; got {args.json}")
    if not 0 < args.seconds < float("inf"):
        options.error(f"--seconds must be a number above 0; got {args.seconds:g}")
    return args


def why_no_gpu() -> str:
    """Why there is nothing to check, from a process of its own; empty if jax has a GPU."""
    ask = "import jax; print(jax.default_backend())"
    try:
        asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired:
        return f"jax did not say within {START_SECONDS:.0f} s what devices there are"
    backend = (asked.stdout.split() or [""])[-1]
    if asked.returncode:
        return f"{sys.executable} cannot run jax: {(asked.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
    if backend != "gpu":
        return f"jax of {sys.executable} sees no GPU (its backend is {backend}): pip install -e '.[cuda13]'"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    # As Ctrl-C does: what runs on the card is ended first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if not args.dry_run and (reason := why_no_gpu()):
        print(f"gpu_check: {reason}. --dry-run goes through without one.", file=sys.stderr)
        return 2
    parts = [part for part in PARTS if part.name in args.only]
    options = ["--dry-run"] * args.dry_run + ["--peer-python", os.environ.get("PEER_PYTHON", sys.executable)]
    options += ["--attention", args.attention] if args.attention else []
    start, found = time.monotonic(), {}
    scale = args.seconds / sum(part.seconds for part in PARTS)
    with tempfile.TemporaryDirectory() as scratch:
        for number, part in enumerate(parts):
            kept = scale * sum(later.seconds for later in parts[number + 1 :])
            left = start + args.seconds - time.monotonic() - kept
            print(f"{part.name}: {left:.0f} s at most", file=sys.stderr)
            found[part.name] = run_part(part, Path(scratch) / part.name, left, options)
            # After every part: who is ended from outside has what there is.
            made = document(argv, args, found)
            beside = args.json.with_name(args.json.name + ".part")
            beside.write_text(json.dumps(made, indent=1) + "\n")
            beside.replace(args.json)
    _print(made, time.monotonic() - start)
    held = all(rule["holds"] for rule in made["limits"].values())
    return 0 if held and all(part["status"] == "ok" for part in found.values()) else 1


def _print(made: Mapping[str, Any], seconds: float) -> None:
    print(report.figures_table(made["figures"]))
    for note in made["notes"]:
        print(note)
    for figure, rule in made["limits"].items():
        answer = "holds" if rule["holds"] else "DOES NOT HOLD"
        print(f"{answer}: {figure} {rule['rule']} {rule['bound']:g} {made['figures'][figure]['unit']}")
    for name, part in made["parts"].items():
        done = sum(step["status"] == "ok" for step in part["steps"].values())
        print(f"{name}: {part['status']}, {done} of {len(part['steps'])} steps, {part['seconds']} s")
    for conditions in (made["machine"], made["versions"]):
        print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    print(f"{made['command']}: {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
