"""Makes `families.json`: what transformers computes from the tiny checkpoints of `tests/family_checkpoints.py`.

    python make_family_goldens.py --out families.json

For each family eight prompts with 24 greedy tokens each by `generate` (EOS ignored, one prompt at a time, eager
attention), their logprobs and the margins between the best two logits, and for one prompt the logits of its last
positions. The script stops where a margin is below 0.01 (take another seed), where transformers does not find every
tensor in its place, and where one forward pass without a cache does not choose the same tokens.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from oracle import greedy, require_margin, write_sections
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
import family_checkpoints as checkpoints

SMALLEST_MARGIN = 0.01

log = logging.getLogger("make_family_goldens")


def load(family: str, folder: Path) -> PreTrainedModel:
    """The model of the folder; raises RuntimeError if a tensor is missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoints.write(family, folder), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if problems := {key: names for key, names in info.items() if names}:
        raise RuntimeError(f"{family}: {problems}")
    return model.eval()


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] by one forward pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def records(family: str, model: PreTrainedModel) -> list[dict]:
    """One record per prompt; the one of `LOGITS_PROMPT` has `logits` as well."""
    found = []
    for number, prompt_ids in enumerate(checkpoints.prompts_of(family)):
        output = greedy(model, prompt_ids, max_new_tokens=checkpoints.MAX_NEW_TOKENS)
        require_margin(f"{family}, prompt of {len(prompt_ids)}", output, SMALLEST_MARGIN)
        at_once = logits_of(model, prompt_ids + output["tokens"])[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
        if at_once != output["tokens"]:
            raise RuntimeError(f"{family}, prompt of {len(prompt_ids)}: generate and one forward pass disagree")
        record = {"prompt_ids": prompt_ids} | output
        if number == checkpoints.LOGITS_PROMPT:
            rows = logits_of(model, prompt_ids)[-checkpoints.LOGITS_POSITIONS :].tolist()
            record["logits"] = [[round(value, 6) for value in row] for row in rows]
        found.append(record)
    different = len({token for record in found for token in record["tokens"]})
    smallest = min(min(record["margins"]) for record in found)
    log.info("%s: %d different tokens, smallest margin %.4f", family, different, smallest)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the goldens of all families with transformers.")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    sections = {}
    for family in checkpoints.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            sections[family] = records(family, load(family, Path(folder)))
    header = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "max_new_tokens": checkpoints.MAX_NEW_TOKENS,
    }
    write_sections(args.out, header, sections)


if __name__ == "__main__":
    main()
