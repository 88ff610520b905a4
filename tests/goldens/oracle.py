"""What the golden scripts share: one greedy run of `transformers`, and the layout of the JSON files.

Invariant: a record is kept only if the greedy choice is far from a tie. Two correct float32 implementations
differ in the last bits of a logit, so a position whose best two logits are nearly equal has no right answer,
and every token after it would depend on it. `require_margin` refuses such a record; the remedy is another
prompt or seed.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel


def greedy(
    model: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int, eos_token_id: int | None = None
) -> dict[str, list]:
    """Greedy continuation of one prompt by `model.generate`, alone in its batch.

    Returns `tokens` (the chosen ids, a final EOS included), `logprobs` (log softmax of the raw logits at each
    chosen token, float32, 6 decimals) and `margins` (best logit minus second best at each position, 4
    decimals). `eos_token_id=None` ignores EOS: exactly `max_new_tokens` tokens come back. The model's own
    generation config is replaced.
    """
    # generate() fills the unset fields of a passed config from the model's own, EOS ids among them.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = torch.tensor([list(prompt_ids)])
    with torch.no_grad():
        output: Any = model.generate(ids, attention_mask=torch.ones_like(ids))
    tokens = output.sequences[0, len(prompt_ids) :]
    logits = torch.cat(output.logits).float()  # [new tokens, vocab]
    if len(tokens) != len(logits) or (eos_token_id is None and len(tokens) != max_new_tokens):
        raise RuntimeError(f"generate returned {len(tokens)} tokens, {len(logits)} rows of logits")
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    return {
        "tokens": tokens.tolist(),
        "logprobs": [round(value, 6) for value in logprobs.tolist()],
        "margins": [round(value, 4) for value in (best - second).tolist()],
    }


def require_margin(name: str, record: dict[str, list], at_least: float) -> None:
    """Raises ValueError when the greedy choice of `record` is too near a tie to be a golden."""
    smallest = min(record["margins"])
    if smallest < at_least:
        position = record["margins"].index(smallest)
        raise ValueError(
            f"{name}: the best two logits at position {position} differ by {smallest},"
            f" goldens need {at_least}; take another prompt or seed"
        )


def write_sections(path: Path, header: dict[str, Any], sections: dict[str, Iterable[dict]]) -> None:
    """Writes `header` and lists of records as one JSON object, one record per line."""
    lines = [f"{encode(key)}: {encode(value)}" for key, value in header.items()]
    for name, records in sections.items():
        body = ",\n".join(encode(record) for record in records)
        lines.append(f"{encode(name)}: [\n{body}\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def encode(value: Any) -> str:
    """Compact JSON, text as it is written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
