"""What sampling costs: of a decode step, and of generated tokens per second.

Waves of 64 requests run greedily and with temperature, top-k and top-p on every row, in turns, through one engine and
the same programs. Prompts have 16 to 127 tokens; 64 tokens are generated for each request.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.workload import Wave, prompts, run_wave

MODES = ("greedy", "sampled")
SHARE, RATIO = 0.1, 0.9


def compare(waves: dict[str, list[Wave]], dtype: str) -> dict[str, report.Figure]:
    """Figures of one dtype; `waves` by mode, in the order in which they ran."""
    figures, medians = {}, {}
    for mode, own in waves.items():
        bucket = max(bucket for wave in own for bucket, _ in wave.steps if bucket.kind == "decode")
        times = [wave.seconds_in("decode", bucket.rows) for wave in own]
        medians[mode] = [statistics.median(seconds) for seconds in times]
        steps = [1e3 * s for seconds in times for s in seconds]
        figures[f"{dtype}, {mode} step of {bucket.rows} rows"] = report.spread(steps, "ms")
        rates = [wave.tokens / wave.seconds for wave in own]
        figures[f"{dtype}, {mode} tokens"] = report.spread(rates, "1/s")
    greedy, sampled = (medians[mode] for mode in MODES)
    shares = [1 - a / b for a, b in zip(greedy, sampled, strict=True)]
    figures[f"{dtype}, sampling's share of a step"] = report.spread(shares, "ratio")
    rates = [b.tokens / b.seconds / (a.tokens / a.seconds) for a, b in zip(*waves.values(), strict=True)]
    figures[f"{dtype}, sampled against greedy tokens"] = report.spread(rates, "ratio")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("sampling", __doc__)
    report.add_model_options(options)
    options.add_argument("--requests", type=int, default=64, help="of a wave (default 64, --quick 8)")
    options.add_argument("--new-tokens", type=int, default=64, help="of a request (default 64, --quick 8)")
    options.add_argument("--waves", type=int, default=3, help="of each kind after warm-up (default 3, --quick 1)")
    options.add_argument("--max-batch-tokens", type=int, default=512, help="token budget of a step (default 512)")
    args = options.parse_args(argv)
    if args.quick:
        args.requests, args.new_tokens, args.waves = min(args.requests, 8), min(args.new_tokens, 8), 1

    from cbjax import CausalLM, ContinuousBatchingConfig, WorkloadHints
    from cbjax.sampling import SamplingParams
    from cbjax.session import Session

    drawn = [
        SamplingParams(do_sample=True, temperature=0.8, top_k=50, top_p=0.9, seed=seed) for seed in range(args.requests)
    ]
    settings = {"greedy": [SamplingParams()] * args.requests, "sampled": drawn}
    config = ContinuousBatchingConfig(
        block_size=32, max_batch_tokens=args.max_batch_tokens, max_requests_per_batch=args.requests
    )
    figures: dict[str, report.Figure] = {}
    for dtype in args.dtype:
        lm = CausalLM.from_pretrained(args.model, dtype=dtype, progress_bar=True)
        inputs = prompts(args.requests, lm.vocab_size)
        hints = WorkloadHints(
            max_prompt_length=max(map(len, inputs)),
            max_generated_length=args.new_tokens,
            num_requests=args.requests,
        )
        session = Session(lm, config, hints)
        run_wave(session.engine, inputs, args.new_tokens, settings["sampled"])  # compiles
        waves: dict[str, list[Wave]] = {mode: [] for mode in MODES}
        for _ in range(args.waves):
            for mode in MODES:
                waves[mode].append(run_wave(session.engine, inputs, args.new_tokens, settings[mode]))
        session.close()
        figures |= compare(waves, dtype)
    limits = {}
    for name, figure in figures.items():
        if name.endswith("share of a step"):
            limits[name] = report.limit(figure, SHARE)
        elif name.endswith("against greedy tokens"):
            limits[name] = report.limit(figure, RATIO, at_least=True)
    report.finish("sampling", argv, args, figures, limits=limits)


if __name__ == "__main__":
    main()
