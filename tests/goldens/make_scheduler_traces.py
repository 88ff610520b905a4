"""Makes `scheduler_traces.json`: which tokens transformers' own continuous batching runs at each step.

    python make_scheduler_traces.py --out scheduler_traces.json

Recorded with transformers 5.24.0, whose field `page_size` is the number of tokens of a block, called
`block_size` here. The engine runs on CPU with a tiny random Llama, block sharing off and EOS off, so the
schedule depends on the settings of a record alone, never on the tokens.

A record has the settings and `steps`, one for each call of the scheduler:
- `rows`: [request id, number of query tokens] in the order of the batch;
- `query_tokens`: their sum, and `kv_reads`: the sum of the rows' KV lengths before the step.
Request `ri` has `prompt_lengths[i]` prompt tokens and is there from step `arrivals[i]` on, counted from 0.

Two sections: `traces`, where the pool has room for everything, and `pressure`, for information, where it has
not. There a step also has `full` (nothing could run: the answer is no batch, and the next step is the second
try), `starved` (active requests that did not get their blocks) and `soft_reset` (requests sent back to
waiting after this step, in the order they wait).
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from oracle import write_sections
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

BLOCK_SIZE = 4
RESULT_TIMEOUT_S = 60.0

log = logging.getLogger("make_scheduler_traces")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of one recorded run; lengths and budgets in tokens, arrivals in steps."""

    name: str
    scheduler: str = "fifo"
    prompt_lengths: tuple[int, ...]
    arrivals: tuple[int, ...]
    max_new_tokens: int
    max_batch_tokens: int
    max_requests_per_batch: int | None = None
    num_blocks: int = 64

    @property
    def safety_margin(self) -> float:
        """The engine's default for the scheduler, passed explicitly."""
        return {"fifo": 0.15, "prefill_first": 0.0}[self.scheduler]


CHUNKED = Case(name="chunked", prompt_lengths=(10, 7, 4), arrivals=(0, 0, 0), max_new_tokens=4, max_batch_tokens=8)
ROOMY = (
    CHUNKED,
    replace(CHUNKED, name="two_requests_a_batch", max_requests_per_batch=2),
    Case(
        name="mixed_lengths",
        prompt_lengths=(3, 30, 5, 1, 12),
        arrivals=(0, 0, 0, 0, 0),
        max_new_tokens=6,
        max_batch_tokens=16,
    ),
    Case(
        name="late_arrivals",
        prompt_lengths=(4, 20, 9, 2),
        arrivals=(0, 2, 3, 6),
        max_new_tokens=6,
        max_batch_tokens=8,
    ),
)
FULL_POOL = Case(
    name="all_starve_at_once",
    prompt_lengths=(5, 5, 5, 5),
    arrivals=(0, 0, 0, 0),
    max_new_tokens=12,
    max_batch_tokens=32,
    num_blocks=8,
)
TIGHT = (
    FULL_POOL,
    replace(FULL_POOL, name="one_starves_beside_others", prompt_lengths=(5, 6, 7, 8)),
)


def tiny_model() -> LlamaForCausalLM:
    """One random layer; its blocks are multiples of the engine's 128-byte grain, so `num_blocks` is exact."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def start_manager(model: LlamaForCausalLM, case: Case) -> ContinuousBatchingManager:
    """The engine with the settings of `case`, not yet running."""
    return model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=case.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=case.num_blocks,
            max_batch_tokens=case.max_batch_tokens,
            max_requests_per_batch=case.max_requests_per_batch,
            scheduler_type=case.scheduler,
            safety_margin=case.safety_margin,
            allow_block_sharing=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
        ),
    )


def submit(manager: ContinuousBatchingManager, case: Case, step: int) -> None:
    """Hands over the requests that are there from `step` on."""
    for index, arrival in enumerate(case.arrivals):
        if arrival == step:
            manager.add_request([1] * case.prompt_lengths[index], request_id=f"r{index}")


@contextmanager
def recording(manager: ContinuousBatchingManager, case: Case) -> Iterator[list[dict]]:
    """Records each call of the scheduler and of the offloading inside the block; submits late requests."""
    steps: list[dict] = []
    scheduler_class = SCHEDULER_MAPPING[case.scheduler]
    schedule, offload = scheduler_class.schedule_batch, OffloadingManager.offload_requests

    def schedule_batch(scheduler: Any, token_budget: int, cache_budget: int) -> tuple:
        answer = schedule(scheduler, token_budget, cache_budget)
        batch, _, query_tokens, kv_reads = answer
        rows = [[row.state.request_id, row.query_length] for row in batch or ()]
        step = {"rows": rows, "query_tokens": query_tokens, "kv_reads": kv_reads}
        starved = [state.request_id for state, _ in scheduler.starved_requests]
        steps.append(step | {"full": batch is None, "starved": starved, "soft_reset": []})
        submit(manager, case, step=len(steps))  # drained just before the next call
        return answer

    def offload_requests(offloading: Any) -> bool:
        scheduler = offloading.scheduler
        active = set(scheduler.active_requests)
        answer = offload(offloading)
        gone = active - set(scheduler.active_requests)
        steps[-1]["soft_reset"] += [name for name in scheduler.waiting_requests_order if name in gone]
        return answer

    with (
        patch.object(scheduler_class, "schedule_batch", schedule_batch),
        patch.object(OffloadingManager, "offload_requests", offload_requests),
    ):
        yield steps


def run(model: LlamaForCausalLM, case: Case) -> list[dict]:
    """The recorded steps of one run; RuntimeError if a request does not end with all its tokens."""
    manager = start_manager(model, case)
    with recording(manager, case) as steps:
        submit(manager, case, step=0)
        manager.start()
        try:
            for _ in case.prompt_lengths:
                result = manager.get_result(timeout=RESULT_TIMEOUT_S)
                if result is None or len(result.generated_tokens) != case.max_new_tokens:
                    raise RuntimeError(f"{case.name}, {case.scheduler}: incomplete result {result}")
        finally:
            manager.stop()
            manager.destroy()
    return steps


def without_pressure(step: dict) -> dict:
    """The step's three plain fields; RuntimeError if the pool was short after all."""
    if step["full"] or step["starved"] or step["soft_reset"]:
        raise RuntimeError(f"a trace that should have room met pressure: {step}")
    return {key: step[key] for key in ("rows", "query_tokens", "kv_reads")}


def records(model: LlamaForCausalLM, cases: tuple[Case, ...], *, pressure: bool) -> list[dict]:
    """One record per case and scheduler."""
    found = []
    for case in cases:
        for scheduler in SCHEDULER_MAPPING:
            chosen = replace(case, scheduler=scheduler)
            steps = run(model, chosen)
            steps = steps if pressure else [without_pressure(step) for step in steps]
            log.info("%s, %s: %d steps", case.name, scheduler, len(steps))
            settings = asdict(chosen) | {"safety_margin": chosen.safety_margin, "block_size": BLOCK_SIZE}
            found.append(settings | {"steps": steps})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Make scheduler_traces.json with transformers.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    torch.set_num_threads(1)

    model = tiny_model()
    sections = {
        "traces": records(model, ROOMY, pressure=False),
        "pressure": records(model, TIGHT, pressure=True),
    }
    write_sections(args.out, {"transformers": transformers.__version__}, sections)


if __name__ == "__main__":
    main()
