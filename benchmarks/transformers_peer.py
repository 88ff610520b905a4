"""A side of `benchmarks.vs_transformers` and `benchmarks.pressure`: transformers on the CPU, in its own environment.

    python transformers_peer.py MODE JOB

MODE is "generate_batch" (transformers' continuous batching) or "generate" (left-padded, one batch). JOB is a JSON file
with `model` (a folder), `dtype`, `threads`, `prompts` (lists of ids), `block_size`, `max_batch_tokens` and
`num_blocks`. The first line of standard output is {"versions": {...}}; each line of standard input,
{"count": requests, "new_tokens": n}, is answered by {"seconds": s, "tokens": [[id, ...], ...]} for the first `count`
prompts. It needs Python 3.10 or later, torch and transformers, and nothing of cbjax.
"""

import json
import os
import sys
import time
import traceback

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def batched(model, job, prompts, new_tokens):
    """Continuous batching with one manager for all calls, so that store and thread are set up once."""
    config = ContinuousBatchingConfig(
        page_size=job["block_size"],
        num_blocks=job["num_blocks"],
        max_batch_tokens=job["max_batch_tokens"],
        allow_block_sharing=False,  # a repeated prompt must not be found computed
    )
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=config,
        max_new_tokens=new_tokens,
        persistent_manager=True,
    )
    errors = {output.error for output in outputs.values() if output.error}
    if errors or len(outputs) < len(prompts):
        raise RuntimeError("; ".join(errors) or f"{len(outputs)} of {len(prompts)} requests came back")
    return [output.generated_tokens for output in outputs.values()]


def padded(model, job, prompts, new_tokens):
    """`generate` for all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # generate() fills what a config leaves open from the model's own, EOS ids among it.
    model.generation_config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask)[:, longest:].tolist()


def main():
    mode, job_file = sys.argv[1:]
    run = {"generate_batch": batched, "generate": padded}[mode]
    # Libraries print to standard output; it is kept for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open(job_file) as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa").eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            start = time.perf_counter()
            tokens = run(model, job, job["prompts"][: asked["count"]], asked["new_tokens"])
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # in either case a manager's thread may still wait for work


if __name__ == "__main__":
    main()
