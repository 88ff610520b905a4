"""Seconds of a step with a small and a large KV pool: it must not depend on the pool's size.

Waves of 16 and of 64 requests, 16 prompt tokens and 16 new ones each, run through two engines that differ in
`num_blocks` only and take turns. Blocks have 4 tokens, so that 64 such requests fill the small pool. Compared are
decode steps and the largest mixed bucket that the wave uses, each with the same step of the other engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.workload import Wave, prompts, run_wave

BLOCK_SIZE, MAX_BATCH_TOKENS = 4, 512
PROMPT_TOKENS = NEW_TOKENS = 16
TOLERANCE = 1.1


def compare(waves: dict[int, list[Wave]], rows: int, dtype: str) -> dict[str, report.Figure]:
    """Figures of one dtype and number of rows; `waves` by blocks of the pool, in the order in which they ran."""
    figures = {}
    for kind in ("decode", "mixed"):
        times = {blocks: [s for wave in own for s in _times(wave, kind)] for blocks, own in waves.items()}
        for blocks, seconds in times.items():
            name = f"{dtype}, {rows} rows, {kind}, {blocks:,} blocks"
            figures[name] = report.spread([1e3 * s for s in seconds], "ms")
        small, large = times.values()
        ratios = [b / a for a, b in zip(small, large, strict=True)]
        figures[f"{dtype}, {rows} rows, {kind}, large against small"] = report.spread(ratios, "ratio")
    return figures


def _times(wave: Wave, kind: str) -> list[float]:
    """Seconds of the steps in the largest bucket of that kind."""
    largest = max(bucket for bucket, _ in wave.steps if bucket.kind == kind)
    return [seconds for bucket, seconds in wave.steps if bucket == largest]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = report.parser("pool_size", __doc__)
    report.add_model_options(options)
    options.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="requests of a wave (default 16 64)")
    options.add_argument("--blocks", type=int, nargs=2, default=[512, 16_384], help="pools (default 512 16384)")
    options.add_argument("--waves", type=int, default=5, help="of each engine after warm-up (default 5, --quick 1)")
    args = options.parse_args(argv)

    from cbjax import CausalLM, ContinuousBatchingConfig, WorkloadHints
    from cbjax.sampling import SamplingParams
    from cbjax.session import Session

    hints = WorkloadHints(max_prompt_length=PROMPT_TOKENS, max_generated_length=NEW_TOKENS, num_requests=max(args.rows))
    figures: dict[str, report.Figure] = {}
    for dtype in args.dtype:
        lm = CausalLM.from_pretrained(args.model, dtype=dtype, progress_bar=True)
        sessions = {}
        for blocks in args.blocks:
            config = ContinuousBatchingConfig(
                block_size=BLOCK_SIZE,
                num_blocks=blocks,
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_requests_per_batch=max(args.rows),
                safety_margin=0.0,
                allow_block_sharing=False,  # waves repeat their prompts
            )
            sessions[blocks] = Session(lm, config, hints)
        for rows in args.rows:
            inputs = prompts(rows, lm.vocab_size, shortest=PROMPT_TOKENS, longest=PROMPT_TOKENS)
            waves: dict[int, list[Wave]] = {blocks: [] for blocks in args.blocks}
            for _ in range(1 + (1 if args.quick else args.waves)):
                for blocks, session in sessions.items():
                    waves[blocks].append(run_wave(session.engine, inputs, NEW_TOKENS, [SamplingParams()] * rows))
            # The first waves compiled.
            figures |= compare({blocks: own[1:] for blocks, own in waves.items()}, rows, dtype)
        for session in sessions.values():
            session.close()
    limits = {name: report.limit(figures[name], TOLERANCE) for name in figures if name.endswith("against small")}
    report.finish("pool_size", argv, args, figures, limits=limits)


if __name__ == "__main__":
    main()
