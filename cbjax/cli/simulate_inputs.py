"""What `cbjax simulate` was asked for, as the values that a simulation takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbjax.cli.usage import UsageError
from cbjax.ladder import make_ladder
from cbjax.scheduler import EVICTION_MAPPING, SchedulerConfig
from cbjax.simulate import WORKLOADS, LinearCost, Trace, read_trace, roofline, simulation_config, workload_named
from cbjax.simulate.roofline import HARDWARE, LLAMA_3_8B

DEFAULT_REQUESTS = 1000


def trace_of(args: argparse.Namespace) -> Trace:
    """The requests.

    Raises:
      UsageError: neither a file nor a workload model, or an option that it has no use for.
      ValueError, OSError: the file is no trace.
    """
    if args.trace in WORKLOADS:
        if args.segment_size is not None:
            raise UsageError(f"--segment-size is of a .jsonl file; {args.trace} is a workload model")
        count = DEFAULT_REQUESTS if args.requests is None else args.requests
        return workload_named(args.trace).sample(count, rate=args.rate, seed=args.seed)
    path = Path(args.trace)
    if not path.is_file():
        raise UsageError(
            f"{args.trace!r} is neither a trace, which is a file, nor a workload model, which are "
            f"{', '.join(sorted(WORKLOADS))}"
        )
    trace = read_trace(path) if args.segment_size is None else read_trace(path, segment_size=args.segment_size)
    if args.requests is not None:
        trace = trace.head(args.requests)
    if args.rate is None:
        return trace
    # Requests that come at once have no rhythm to keep.
    return trace.scaled(args.rate) if trace.span else trace.with_poisson_arrivals(args.rate, seed=args.seed)


def config_of(args: argparse.Namespace) -> SchedulerConfig:
    """Pool and scheduler, with the first value of what is varied.

    Raises:
      UsageError: no such eviction policy.
      ValueError: a value outside its range.
    """
    unknown = [name for name in args.eviction or () if name not in EVICTION_MAPPING]
    if unknown:
        raise UsageError(f"--eviction is one of {', '.join(sorted(EVICTION_MAPPING))}; got {', '.join(unknown)}")
    given: dict[str, Any] = {"eviction": args.eviction[0]} if args.eviction else {}
    config = simulation_config(
        num_blocks=args.num_blocks[0],
        block_size=args.block_size,
        policy=args.scheduler,
        safety_margin=args.margin[0] if args.margin else None,
        max_batch_tokens=args.max_batch_tokens,
        max_requests_per_batch=args.rows,
        host_blocks=args.offload,
        shares_blocks=not args.no_sharing,
        **given,
    )
    for margin in args.margin or ():
        replace(config, safety_margin=margin)  # so that the last value of a sweep is checked before the first runs
    for num_blocks in args.num_blocks:
        replace(config, num_blocks=num_blocks, max_blocks_per_request=num_blocks)
    return config


def varied(args: argparse.Namespace) -> Mapping[str, Sequence[Any]]:
    """Settings of more than one value; the last is the horizontal axis of a picture."""
    settings = {"eviction": args.eviction, "safety_margin": args.margin, "num_blocks": args.num_blocks}
    distinct = {name: list(dict.fromkeys(values or ())) for name, values in settings.items()}
    return {name: values for name, values in distinct.items() if len(values) > 1}


def cost_of(args: argparse.Namespace, config: SchedulerConfig) -> LinearCost:
    """Seconds of a step: measured ones, or a data sheet's.

    Raises:
      UsageError: both.
      ValueError, OSError: the file has no cost model; a size is not positive.
    """
    sizes = {"--hardware": args.hardware, "--parameters": args.parameters, "--kv-bytes": args.kv_bytes}
    if args.cost is not None:
        given = [name for name, value in sizes.items() if value is not None]
        if given:
            raise UsageError(f"--cost has measured seconds, which need no {' and no '.join(given)}; drop one or other")
        try:
            return LinearCost.from_json(args.cost.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--cost {args.cost}: {error}") from None
    model = LLAMA_3_8B
    if args.parameters is not None:
        parameters = 1e9 * args.parameters
        model = replace(model, name=f"{args.parameters:g}B", parameters=parameters, weight_bytes=2 * parameters)
    if args.kv_bytes is not None:
        model = replace(model, kv_bytes_per_token=args.kv_bytes)
    ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    return roofline(ladder, block_size=config.block_size, hardware=HARDWARE[args.hardware or "h100"], model=model)
