"""The other side of the check's engine part: transformers' continuous batching on the GPU, of random weights.

    python transformers_gpu.py generate_batch JOB

The protocol is that of benchmarks/transformers_peer.py: the first line of standard output is {"versions": {...}}, each
line of standard input, {"count": requests, "new_tokens": n}, is answered by {"seconds": s, "tokens": [[id, ...], ...]}.
JOB is a JSON file with `config` (as Hugging Face writes it), `dtype`, `attention`, `prompts`, `block_size`,
`max_batch_tokens` and `num_blocks`. It needs torch and transformers, fetches nothing, and runs on a CPU where there is
no GPU.
"""

import dataclasses
import json
import os
import sys
import time
import traceback

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def batching(job):
    """Settings; what a block is called has changed."""
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    return ContinuousBatchingConfig(
        **{"page_size" if "page_size" in fields else "block_size": job["block_size"]},
        num_blocks=job["num_blocks"],
        max_batch_tokens=job["max_batch_tokens"],
        allow_block_sharing=False,  # a repeated prompt must not be found computed
    )


def build(job, device):
    """The model; its weights are drawn on the device."""
    config = dict(job["config"])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job["dtype"]), attn_implementation=job["attention"]
        ).eval()


def run(model, job, prompts, new_tokens):
    """One manager for all calls, so that store, graphs and thread are set up once."""
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=job["batching"],
        max_new_tokens=new_tokens,
        persistent_manager=True,
    )
    errors = {output.error for output in outputs.values() if output.error}
    if errors or len(outputs) < len(prompts):
        raise RuntimeError("; ".join(errors) or f"{len(outputs)} of {len(prompts)} requests came back")
    return [list(output.generated_tokens) for output in outputs.values()]


def decided(model):
    """What the manager chose, where it can be asked: names, each with a 1."""
    manager = getattr(model, "_cached_continuous_batching_manager", None)
    config = getattr(manager, "continuous_batching_config", None)
    names = ("use_cuda_graph", "use_async_batching", "max_requests_per_batch", "num_blocks")
    return {f"{name} {getattr(config, name)}": 1.0 for name in names if hasattr(config, name)}


def main():
    # Libraries print to standard output; it is kept for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open(sys.argv[2]) as file:
        job = json.load(file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, job["batching"] = build(job, device), batching(job)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "torch device": device}
        print(json.dumps({"versions": versions}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            start = time.perf_counter()
            tokens = run(model, job, job["prompts"][: asked["count"]], asked["new_tokens"])
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            print(
                json.dumps({"seconds": seconds, "tokens": tokens, "counts": decided(model)}), file=answers, flush=True
            )
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # in either case a manager's thread may still wait for work


if __name__ == "__main__":
    main()
