"""`cbjax generate`: text for prompts given as arguments or in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from cbjax.cli.usage import UsageError
from cbjax.paths import check_writable, write_whole

EXAMPLE = "example: cbjax generate 'What is the capital of France?'"


def add_parser(commands: Any, name: str) -> None:
    """Adds the command to those of `ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        name,
        help="generate text for one prompt or many",
        description="A single prompt streams as text; many are batched, with a progress bar and a closing table.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text; '-' reads one prompt from standard input")
    add("--model", default="demo", help="'demo' (SmolLM2-135M-Instruct), a Hugging Face folder, a .gguf file, a hub id")
    add("--file", type=Path, metavar="PROMPTS.JSONL", help="one prompt per line: a JSON string, list of ids, or object "
        "with 'prompt' (text or ids) or 'messages'")  # fmt: skip
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", default=None, help="prompts are a user's messages")
    style.add_argument("--raw", dest="chat", action="store_false", help="prompts are continued as they are; default: "
                       "--chat where the model has a chat template")  # fmt: skip
    add("--max-new-tokens", type=int, default=256, metavar="N", help="output tokens at most (default 256)")
    add("--temperature", type=float, metavar="T", help="sample with this temperature; default: greedy")
    add("--top-k", type=int, metavar="K", help="sample from the K largest logits")
    add("--top-p", type=float, metavar="P", help="sample from the smallest set of this probability")
    add(
        "-n",
        "--num-return-sequences",
        type=int,
        default=1,
        metavar="N",
        help="continuations of each prompt; more than one needs --temperature, --top-k or --top-p",
    )
    add("--seed", type=int, help="makes sampled output reproducible")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and KV cache (default float32)")
    add("--block-size", type=int, metavar="TOKENS", help="tokens of a KV block (default 256)")
    add("--num-blocks", type=int, metavar="N", help="blocks of the KV pool (default: what the prompts need)")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens computed in one step")
    add("--cpu-offload-space", type=float, metavar="GIB", help="host memory for requests that lose their blocks")
    add("--scheduler", choices=("fifo", "prefill_first"), default="fifo", help="scheduling policy (default fifo)")
    add(
        "--batch-invariant",
        action="store_true",
        help="the same bits whatever else runs; proven first, which takes time",
    )
    add("--json", type=Path, metavar="OUT", help="write outputs, settings and summary as JSON ('-': standard output)")
    add("--record", type=Path, metavar="FILE", help="record the run for `cbjax replay`; the file has the prompts' ids")
    add("--trace", type=Path, metavar="FILE", help="write a timeline of the steps for https://ui.perfetto.dev, and "
        "show it as a table")  # fmt: skip
    add(
        "--report",
        action="store_true",
        help="show settings and why, what takes memory, and all programs",
    )


def run(args: argparse.Namespace) -> int:
    """Runs it; 1 if a request failed."""
    prompts = _read_prompts(args)
    for option, path in (("--json", args.json), ("--record", args.record), ("--trace", args.trace)):
        _check_place(option, path)

    from cbjax.causal_lm import CausalLM
    from cbjax.config import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        num_return_sequences=args.num_return_sequences,
    )
    names = ("block_size", "num_blocks", "max_batch_tokens", "cpu_offload_space", "batch_invariant")
    asked = {name: value for name in names if (value := getattr(args, name)) is not None}
    config = ContinuousBatchingConfig(seed=args.seed, scheduler_type=args.scheduler, **asked)
    lm = CausalLM.from_pretrained(args.model, dtype=args.dtype, progress_bar=True)
    inputs = [_as_input(prompt, args.chat, lm) for prompt in prompts]
    quiet = str(args.json) == "-"
    streams = len(inputs) == args.num_return_sequences == 1
    unwritten: list[str] = []
    try:
        with lm.record_to(args.record) if args.record else nullcontext(), _traced(lm, args.trace, unwritten):
            if streams:
                _stream(lm, inputs[0], generation, config, sys.stderr if quiet else sys.stdout)
            else:
                lm.generate_batch(inputs, generation, config, progress_bar=True)
    finally:  # an interrupted run has outputs, too
        if args.json and lm.summary:
            with _noting(unwritten, "--json", args.json):
                _write_json(args, lm)
    if not (streams or quiet):
        _show(lm.last_outputs.values())
    print(f"\n{lm.summary}", file=sys.stderr)
    if args.report and lm.session:
        plans = (lm.session.resolved.report(), lm.memory_plan(), lm.compile_plan())
        print("", *plans, sep="\n\n", file=sys.stderr)
    failed = [output for output in lm.last_outputs.values() if output.error]
    for output in failed:
        print(f"cbjax: {output.request_id} failed: {output.error}", file=sys.stderr)
    for note in unwritten:
        print(f"cbjax: {note}", file=sys.stderr)
    return 1 if failed or unwritten else 0


def _check_place(option: str, path: Path | None) -> None:
    """Raises ValueError if no file can be there."""
    if path is None or (option == "--json" and str(path) == "-"):
        return
    try:
        check_writable(path)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None


@contextmanager
def _noting(unwritten: list[str], option: str, path: Path) -> Iterator[None]:
    """A file that cannot be written after all takes none of the answers with it."""
    try:
        yield
    except OSError as error:
        unwritten.append(f"{option} {path} was not written: {error.strerror or error}")


@contextmanager
def _traced(lm: Any, path: Path | None, unwritten: list[str]) -> Iterator[None]:
    """Writes the timeline of what runs inside, of an interrupted run, too; notes it if that cannot be."""
    if path is None:
        yield
        return
    with lm.timeline() as timeline:
        try:
            yield
        finally:
            print(f"\n{timeline}", file=sys.stderr)
            with _noting(unwritten, "--trace", path):
                timeline.save(path)
                print(f"\n{path}: open it in https://ui.perfetto.dev", file=sys.stderr)


def _read_prompts(args: argparse.Namespace) -> list[Any]:
    if "-" in args.prompts and sys.stdin is None:
        raise UsageError("'-' reads a prompt from standard input, which is closed")
    prompts: list[Any] = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    if args.file is not None:
        # Lines end at "\n" alone: JSON strings may hold the other characters that str.splitlines splits at.
        for number, line in enumerate(args.file.read_text(encoding="utf-8-sig").split("\n"), start=1):
            if line.strip():
                prompts.append(_parse_line(line, f"{args.file}, line {number}"))
    if not prompts:
        raise UsageError(f"no prompts: give some as arguments or with --file; {EXAMPLE}")
    return prompts


def _parse_line(line: str, where: str) -> Any:
    """Text, ids, or messages of one line of a prompt file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: every line is JSON: {error}") from error
    if isinstance(value, dict):
        known = [value[key] for key in ("prompt", "messages", "text") if key in value]
        if len(known) != 1:
            raise ValueError(f"{where}: an object has exactly one of 'prompt', 'messages', 'text'; got {sorted(value)}")
        value = known[0]
    if not isinstance(value, str | list):
        raise ValueError(f"{where}: a prompt is text, a list of token ids, or a list of messages; got {value!r}")
    return value


def _as_input(prompt: Any, chat: bool | None, lm: Any) -> Any:
    """Text becomes a user's message where that is asked for or, by default, where the model was made for it."""
    if chat is None:
        chat = getattr(lm.tokenizer, "chat_template", None) is not None
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def _stream(lm: Any, prompt: Any, generation: Any, config: Any, out: TextIO) -> None:
    told = 0
    for output in lm.stream(prompt, generation, config, progress_bar=True):
        print(output.text[told:], end="", file=out, flush=True)
        told = len(output.text)
    print(file=out)


def _show(outputs: Any) -> None:
    for output in outputs:
        print(f"[{output.request_id}] {output.text}\n")


def _write_json(args: argparse.Namespace, lm: Any) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    document = {
        "settings": settings,
        "summary": asdict(lm.summary) | {"tokens_per_second": lm.summary.tokens_per_second},
        "outputs": [asdict(output) | {"status": output.status.name} for output in lm.last_outputs.values()],
    }
    text = json.dumps(document, indent=1, allow_nan=False)  # ASCII, so that every prompt can be written
    if str(args.json) == "-":
        print(text)
    else:
        write_whole(args.json, [text, "\n"])
