"""What the batch-invariant mode costs: generated tokens per second with it and without it.

Waves of the same requests run in turns through one engine of each kind, for each number of requests. Prompts have 16 to
127 tokens; 64 tokens are generated for each request. Warm-up with the mode is compiling and the proof.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks import report
from benchmarks.workload import Wave, prompts, run_wave

OFF, ON = "off", "on"
RATIO = 0.8


def compare(waves: dict[str, list[Wave]], label: str) -> dict[str, report.Figure]:
    """Figures of one dtype and number of requests; `waves` by mode, in the order in which they ran."""
    rates = {mode: [wave.tokens / wave.seconds for wave in own] for mode, own in waves.items()}
    figures = {f"{label}, {mode}": report.spread(own, "tokens/s") for mode, own in rates.items()}
    ratios = [on / off for on, off in zip(rates[ON], rates[OFF], strict=True)]
    return figures | {f"{label}, on against off": report.spread(ratios, "ratio")}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("invariance", __doc__)
    report.add_model_options(options)
    options.add_argument("--requests", type=int, nargs="+", default=[4, 16, 32], help="of a wave (default 4 16 32)")
    options.add_argument("--new-tokens", type=int, default=64, help="of a request (default 64, --quick 8)")
    options.add_argument("--waves", type=int, default=3, help="of each kind after warm-up (default 3, --quick 1)")
    options.add_argument("--max-batch-tokens", type=int, default=512, help="token budget of a step (default 512)")
    args = options.parse_args(argv)
    if args.quick:
        args.requests, args.new_tokens, args.waves = [4], min(args.new_tokens, 8), 1

    from cbjax import CausalLM, ContinuousBatchingConfig, WorkloadHints
    from cbjax.sampling import SamplingParams
    from cbjax.session import Session

    most = max(args.requests)
    figures: dict[str, report.Figure] = {}
    notes: list[str] = []
    for dtype in args.dtype:
        lm = CausalLM.from_pretrained(args.model, dtype=dtype, progress_bar=True)
        inputs = prompts(most, lm.vocab_size)
        hints = WorkloadHints(
            max_prompt_length=max(map(len, inputs)), max_generated_length=args.new_tokens, num_requests=most
        )
        sessions: dict[str, Session] = {}
        for mode in (OFF, ON):
            config = ContinuousBatchingConfig(
                block_size=32,
                max_batch_tokens=args.max_batch_tokens,
                max_requests_per_batch=most,
                allow_block_sharing=False,
                batch_invariant=mode == ON,
            )
            sessions[mode] = Session(lm, config, hints)
            start = time.perf_counter()
            compiled = sessions[mode].warmup()
            seconds = time.perf_counter() - start
            figures[f"{dtype}, warm-up of {len(compiled)} programs, {mode}"] = report.spread([seconds], "s")
        proof = sessions[ON].proof
        assert proof is not None
        notes.append(f"{dtype}: {proof.used}: {proof.why}")
        greedy = [SamplingParams()] * most
        for count in args.requests:
            waves: dict[str, list[Wave]] = {OFF: [], ON: []}
            for number in range(args.waves + 1):
                for mode, own in waves.items():
                    wave = run_wave(sessions[mode].engine, inputs[:count], args.new_tokens, greedy[:count])
                    own += [wave] * (number > 0)
            figures |= compare(waves, f"{dtype}, {count} requests")
        for session in sessions.values():
            session.close()
    limits = {
        name: report.limit(figure, RATIO, at_least=True)
        for name, figure in figures.items()
        if name.endswith("on against off")
    }
    report.finish("invariance", argv, args, figures, limits=limits, notes=notes)


if __name__ == "__main__":
    main()
