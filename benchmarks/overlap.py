"""How much of the time the device works: each step's answers awaited, steps in flight, and windows of decode steps.

The first part has a device that only takes time, some milliseconds for each step, in a process of its own
(`benchmarks.device_queue`): its model is a stub with the arguments of a real one, and what is measured is whether the
host keeps its queue filled. The second part is a real model, whose device intervals are those of `lm.timeline()`;
on a CPU host and device are the same cores. "sync" is `use_async_batching=False`, "async" has steps in flight,
"windows" also has several decode steps in one dispatch. The modes take turns in every repetition.

The workload is one wave: all requests are submitted at once and generate as many tokens each. A device-active fraction
of wall clock says that the device had work, not how well it used it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.device_queue import DeviceQueue

if TYPE_CHECKING:
    from cbjax import CausalLM, ContinuousBatchingConfig

MODES = ("sync", "async", "windows")
# Device-active fractions that "async" has to reach, by milliseconds of a step.
AT_LEAST = {5.0: 0.994, 2.0: 0.98}
ACTIVE, TOKENS = "device-active", "tokens/s"

type Runs = dict[str, list[dict[str, float]]]


def config_of(mode: str, args: Namespace) -> ContinuousBatchingConfig:
    """A mode as settings."""
    from cbjax import ContinuousBatchingConfig

    return ContinuousBatchingConfig(
        block_size=16,
        max_batch_tokens=args.max_batch_tokens,
        max_requests_per_batch=args.requests,
        allow_block_sharing=False,  # prompts repeat
        use_async_batching=mode != "sync",
        async_depth=None if mode == "sync" else args.depth,
        decode_window=args.window if mode == "windows" else 1,
    )


def generate(lm: CausalLM, prompts: Sequence[list[int]], new_tokens: int, config: ContinuousBatchingConfig) -> float:
    """One wave; its tokens per second."""
    from cbjax import GenerationConfig

    lm.generate_batch(prompts, GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, do_sample=False), config)
    assert lm.summary is not None
    return len(prompts) * new_tokens / lm.summary.seconds


def take_turns(args: Namespace, run: Callable[[str], dict[str, float]]) -> Runs:
    """What each mode's repetitions came to, after one that is not counted."""
    runs: Runs = {mode: [] for mode in MODES}
    for repetition in range(args.repeats + 1):
        for mode in MODES:
            values = run(mode)
            if repetition:
                runs[mode].append(values)
    return runs


def stub_runs(args: Namespace) -> dict[float, Runs]:
    """The stub's, by milliseconds of a step."""
    from benchmarks.stub_device import put_behind, stub_model, stub_session
    from benchmarks.workload import prompts
    from cbjax import WorkloadHints

    lm = stub_model()
    inputs = prompts(args.requests, lm.vocab_size)
    hints = WorkloadHints(
        max_prompt_length=max(map(len, inputs)), max_generated_length=args.new_tokens, num_requests=args.requests
    )
    with DeviceQueue() as queue:
        session = stub_session(lm, config_of("sync", args), hints)
        steps = put_behind(queue, session.device)

        def run(mode: str, seconds: float) -> dict[str, float]:
            steps.seconds_per_step = seconds
            rate = generate(lm, inputs, args.new_tokens, config_of(mode, args))
            assert lm.session is session, "another session was made, whose programs are not the stub's"
            times = queue.take_times()
            return {ACTIVE: times.active, TOKENS: rate, "hand-off": times.handoff / (times.busy + times.idle)}

        found = {ms: take_turns(args, lambda mode, ms=ms: run(mode, ms / 1e3)) for ms in args.step_ms}
    lm.close()
    return found


def model_runs(args: Namespace) -> Runs:
    """A real model's."""
    from benchmarks.workload import prompts
    from cbjax import CausalLM

    lm = CausalLM.from_pretrained(args.model, dtype=args.dtype, progress_bar=True)
    inputs = prompts(args.requests, lm.vocab_size)

    def run(mode: str) -> dict[str, float]:
        with lm.timeline() as timeline:
            rate = generate(lm, inputs, args.new_tokens, config_of(mode, args))
        activity = timeline.device_activity
        return {ACTIVE: activity.fraction, "device-active for sure": activity.sure_fraction, TOKENS: rate}

    found = take_turns(args, run)
    lm.close()
    return found


def figures_of(label: str, runs: Runs) -> dict[str, report.Figure]:
    """Figures of one device."""
    return {
        f"{label}, {mode}, {name}": report.spread(
            [run[name] for run in repetitions], "1/s" if name == TOKENS else "fraction"
        )
        for mode, repetitions in runs.items()
        for name in repetitions[0]
    }


def stub_label(ms: float) -> str:
    return f"{ms:g} ms a step"


def parse(argv: Sequence[str]) -> Namespace:
    options = report.parser("overlap", __doc__)
    options.add_argument("--model", default="demo", help='as from_pretrained takes it, or "none" (default demo)')
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    options.add_argument(
        "--step-ms", type=float, nargs="*", default=[1, 2, 5, 10, 20], help="of the stub (default 1 2 5 10 20)"
    )
    options.add_argument("--requests", type=int, default=32, help="and rows (default 32, --quick 4)")
    options.add_argument("--new-tokens", type=int, default=256, help="of a request (default 256, --quick 8)")
    options.add_argument("--max-batch-tokens", type=int, default=512, help="token budget of a step (default 512)")
    options.add_argument("--depth", type=int, default=1, help="steps in flight of async and windows (default 1)")
    options.add_argument("--window", type=int, default=8, help="decode steps of a dispatch, at most (default 8)")
    options.add_argument("--repeats", type=int, default=3, help="runs of each that count (default 3, --quick 1)")
    args = options.parse_args(argv)
    if args.quick:
        args.requests, args.new_tokens, args.repeats = min(args.requests, 4), min(args.new_tokens, 8), 1
    return args


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    stubs = stub_runs(args) if args.step_ms else {}
    figures: dict[str, report.Figure] = {}
    limits: dict[str, dict[str, Any]] = {}
    for ms, runs in stubs.items():
        figures |= figures_of(stub_label(ms), runs)
        if ms in AT_LEAST:
            name = f"{stub_label(ms)}, async, {ACTIVE}"
            limits[name] = report.limit(figures[name], AT_LEAST[ms], at_least=True)
    active = {
        mode: {f"{ms:g}": figures[f"{stub_label(ms)}, {mode}, {ACTIVE}"]["median"] for ms in stubs} for mode in MODES
    }
    if args.model != "none":
        figures |= figures_of(f"model in {args.dtype}", model_runs(args))
    report.finish("overlap", argv, args, figures, limits=limits, more={"device_active": active})


if __name__ == "__main__":
    main()
