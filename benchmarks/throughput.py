"""Generated tokens per second of the demo model, for batches of requests with random prompts.

Prompts have 16 to 127 random token ids (fixed seed), 64 tokens are generated for each ignoring EOS, greedily. One
warm-up run per setting compiles; then the repeats are timed.
"""

from __future__ import annotations

import numpy as np

from benchmarks.report import finish, parser, spread, table

NEW_TOKENS = 64


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of 16 to 127 ids, the same for every run."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, rng.integers(16, 128)).tolist() for _ in range(count)]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--model", default="demo", help="as CausalLM.from_pretrained takes it (default demo)")
    options.add_argument("--requests", type=int, nargs="+", default=[16, 64], help="batch sizes (default 16 64)")
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default float32 bfloat16")
    options.add_argument("--repeats", type=int, default=3, help="timed runs of each setting (default 3)")
    options.add_argument("--block-size", type=int, default=32, help="tokens of a KV block (default 32)")
    args = options.parse_args()

    from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    config = ContinuousBatchingConfig(block_size=args.block_size, max_batch_tokens=512)
    figures = {}
    for dtype in args.dtypes:
        lm = CausalLM.from_pretrained(args.model, dtype=dtype, progress_bar=True)
        for count in sorted(args.requests, reverse=True):  # the largest first sizes the pool for all
            inputs = prompts(count, lm.vocab_size)
            rates = []
            for _ in range(args.repeats + 1):
                lm.generate_batch(inputs, generation, config, progress_bar=True)
                assert lm.summary is not None
                rates.append(lm.summary.tokens_per_second)
            figures[f"{dtype}, {count} requests"] = spread(rates[1:])
        lm.close()
    rows = [[name, *(f"{f[key]:.0f}" for key in ("median", "min", "max"))] for name, f in figures.items()]
    finish("throughput", args, table(["generated tokens/s", "median", "min", "max"], rows), figures)


if __name__ == "__main__":
    main()
