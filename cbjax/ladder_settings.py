"""The ladder that a config asks for: by level or by hand, held to the budgets, and told."""

from __future__ import annotations

from dataclasses import dataclass

from cbjax.config import ContinuousBatchingConfig
from cbjax.ladder import Density, Ladder, make_ladder

_DENSITIES = {1: Density.COARSE, 2: Density.DOUBLING, 3: Density.FINE}
_DEFAULT_LEVEL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderChoice:
    """A ladder, and for each setting that shapes it: its name, what is used, and why."""

    ladder: Ladder
    settings: tuple[tuple[str, object, str], ...]


def choose_ladder(config: ContinuousBatchingConfig, *, tokens: int, rows: int, most_rows: int) -> LadderChoice:
    """The ladder for steps of `tokens` and `rows`, of which a larger pool would have allowed `most_rows`.

    Raises:
      ValueError: a size that was asked for lies above a budget that was not.
    """
    _check("decode_buckets", config.decode_buckets, most_rows, "max_requests_per_batch")
    _check("mixed_buckets", config.mixed_buckets, tokens, "max_batch_tokens")
    level = config.default_compile_level or _DEFAULT_LEVEL
    ladder = make_ladder(
        max_batch_tokens=tokens,
        max_rows=rows,
        decode=config.max_blocks_per_request != 0,
        density=_DENSITIES[level],
        decode_rungs=config.decode_buckets,
        mixed_rungs=config.mixed_buckets,
    )
    settings = (
        ("default_compile_level", level, f"{len(ladder.buckets)} step programs, {_DENSITIES[level].value}"),
        _told("decode_buckets", config.decode_buckets, [bucket.rows for bucket in ladder.decode]),
        _told("mixed_buckets", config.mixed_buckets, [bucket.tokens for bucket in ladder.mixed]),
    )
    return LadderChoice(ladder=ladder, settings=settings)


def _check(field: str, rungs, budget: int, budget_name: str) -> None:
    if rungs is not None and rungs[-1] > budget:
        raise ValueError(
            f"{field} must not go above {budget_name}, which is {budget} here; got {rungs}: drop {rungs[-1]}, or set "
            f"{budget_name}={rungs[-1]}"
        )


def _told(field: str, asked, used: list[int]) -> tuple[str, object, str]:
    why = "by default_compile_level" if asked is None else "as asked"
    if asked is not None and tuple(asked) != tuple(used):
        why = "up to the largest step that can come"
    return field, ",".join(map(str, used)) or "none", why
