"""The steps of a replay as lines of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbjax.recording import Input, ReplayedStep

HEAD = f"{'step':>6} {'rows':>5} {'prefill':>8} {'decode':>7} {'free blocks':>12} {'waiting':>8}  what happened"
_MOST_NAMED = 6


def line_of(step: ReplayedStep) -> str:
    """Numbers under `HEAD`, then what came before the step, and what it did to whom."""
    plan, state = step.plan, step.state
    batch = plan.batch
    prefill = int(batch.count[~batch.carried].sum())
    numbers = (
        f"{step.index:>6} {batch.num_rows:>5} {prefill:>8} {batch.num_computed - prefill:>7} "
        f"{state.pool.num_free:>12} {len(state.waiting):>8}"
    )
    return f"{numbers}  {'; '.join(_events(step))}".rstrip()


def _events(step: ReplayedStep) -> Iterator[str]:
    """In the order in which they came."""
    plan = step.plan
    yield from filter(None, map(_input, step.inputs))
    if plan.batch.window > 1:
        yield f"a window of {plan.batch.window} steps"
    yield from _listed("soft reset", [f"{r.uid} ({r.num_tokens} tokens)" for r in plan.soft_resets])
    yield from _listed("offloaded", [f"{o.uid} ({len(o.blocks)} blocks)" for o in plan.offloads])
    yield from _listed("restored", [f"{r.uid} ({len(r.blocks)} blocks)" for r in plan.restores])
    cached = [f"{a.uid} ({a.num_cached} cached)" if a.num_cached else str(a.uid) for a in plan.admitted]
    yield from _listed("admitted", cached)
    if plan.num_starved:
        yield f"{plan.num_starved} starved"
    if step.results is None:
        yield "no answers recorded"
    else:
        yield from _listed("ended", [f"{ended.uid} ({ended.reason})" for ended in step.results.ended])


def _input(given: Input) -> str | None:
    """What is worth saying of it."""
    from cbjax.recording import Cancel, Renew, Reset, Start

    match given:
        case Start(config=c):
            return f"engine of {c.num_blocks} blocks of {c.block_size}, {c.policy.name}, {c.eviction.name}"
        case Cancel(uid=uid):
            return f"cancelled {uid}"
        case Renew():
            return "new weights"
        case Reset():
            return "aborted"
    return None


def _listed(what: str, who: list[str]) -> Iterator[str]:
    if who:
        more = f" and {len(who) - _MOST_NAMED} more" if len(who) > _MOST_NAMED else ""
        yield f"{what} {', '.join(who[:_MOST_NAMED])}{more}"
