"""What `cbjax simulate` was asked for, as the values that a simulation takes."""

from __future__ import annotations

import argparse
import sys
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
    if args.seed < 0:
        raise ValueError(f"--seed must be at least 0; got {args.seed}")
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


def measured_of(args: argparse.Namespace) -> LinearCost | None:
    """The cost model of --cost; None: a data sheet is asked for.

    Raises:
      UsageError: both.
      ValueError, OSError: the file has no cost model.
    """
    if args.cost is None:
        return None
    sizes = {"--hardware": args.hardware, "--parameters": args.parameters, "--kv-bytes": args.kv_bytes}
    given = [name for name, value in sizes.items() if value is not None]
    if given:
        raise UsageError(f"--cost has measured seconds, which leave {' and '.join(given)} without effect; drop one")
    try:
        return LinearCost.from_json(args.cost.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--cost {args.cost}: {error}") from None


def config_of(args: argparse.Namespace, measured: LinearCost | None) -> SchedulerConfig:
    """Pool and scheduler, with the first value of what is varied; a step is as large as was `measured`.

    Raises:
      UsageError: no such eviction policy.
      ValueError: a value outside its range.
    """
    unknown = [name for name in args.eviction or () if name not in EVICTION_MAPPING]
    if unknown:
        raise UsageError(f"--eviction is one of {', '.join(sorted(EVICTION_MAPPING))}; got {', '.join(unknown)}")
    given: dict[str, Any] = {"eviction": args.eviction[0]} if args.eviction else {}
    known = measured.buckets if measured else {}
    sizes = {
        "max_requests_per_batch": (args.rows, max((bucket.rows for bucket in known), default=None)),
        "max_batch_tokens": (args.max_batch_tokens, max((bucket.tokens for bucket in known), default=None)),
    }
    for name, (asked, seen) in sizes.items():
        if asked is not None or seen is not None:
            given[name] = seen if asked is None else asked
    config = simulation_config(
        num_blocks=args.num_blocks[0],
        block_size=args.block_size,
        policy=args.scheduler,
        safety_margin=args.margin[0] if args.margin else None,
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


def cost_of(args: argparse.Namespace, config: SchedulerConfig, measured: LinearCost | None) -> LinearCost:
    """Seconds of a step: what was `measured`, else a data sheet's.

    Raises:
      ValueError: a size is not positive; nothing is known of a step that can come.
    """
    ladder = make_ladder(max_batch_tokens=config.max_batch_tokens, max_rows=config.max_requests_per_batch)
    if measured is not None:
        unknown = [bucket for bucket in ladder.buckets if bucket not in measured.buckets]
        if unknown:
            text = ", ".join(map(str, unknown))
            print(f"cbjax: note: {args.cost} has no measured seconds for {text}; estimated from the others' sizes",
                file=sys.stderr)  # fmt: skip
        return measured
    model = LLAMA_3_8B
    if args.parameters is not None:
        parameters = 1e9 * args.parameters
        model = replace(model, name=f"{args.parameters:g}B", parameters=parameters, weight_bytes=2 * parameters)
    if args.kv_bytes is not None:
        model = replace(model, kv_bytes_per_token=args.kv_bytes)
    return roofline(ladder, block_size=config.block_size, hardware=HARDWARE[args.hardware or "h100"], model=model)
