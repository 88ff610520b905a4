"""The ladder: its rungs, which bucket a batch gets, and which buckets a job can come to need."""

import random

import pytest
from machines import POLICIES, Loop, make_batch, make_config, random_config, random_size

from cbjax.ladder import Density, Ladder, make_ladder


def sizes(ladder: Ladder) -> tuple[list[int], list[tuple[int, int]]]:
    assert all(bucket.kind == "decode" and bucket.tokens == bucket.rows for bucket in ladder.decode)
    assert all(bucket.kind == "mixed" for bucket in ladder.mixed)
    return [bucket.rows for bucket in ladder.decode], [(bucket.tokens, bucket.rows) for bucket in ladder.mixed]


@pytest.mark.parametrize(
    ("tokens", "rows", "decode", "mixed"),
    [
        (512, 64, [2, 8, 16, 32, 64], [(64, 64), (128, 64), (256, 64), (512, 64)]),
        (64, 8, [2, 8], [(64, 8)]),
        (16, 1, [2], [(64, 2)]),
        (100, 9, [2, 8, 9], [(64, 9), (100, 9)]),
        (200, 100, [2, 8, 16, 32, 64, 100], [(64, 64), (128, 100), (200, 100)]),
        (65, 4, [2, 4], [(64, 4), (65, 4)]),
    ],
)
def test_rungs_double_up_to_the_budgets(tokens: int, rows: int, decode: list, mixed: list) -> None:
    assert sizes(make_ladder(max_batch_tokens=tokens, max_rows=rows)) == (decode, mixed)


def test_the_budgets_of_an_accelerator_give_seventeen_buckets() -> None:
    ladder = make_ladder(max_batch_tokens=8192, max_rows=1024)
    assert (len(ladder.decode), len(ladder.mixed)) == (9, 8)
    assert len(ladder.buckets) == len(set(ladder.buckets)) == 17


@pytest.mark.parametrize(
    ("density", "decode", "mixed"),
    [
        (Density.COARSE, [2, 8, 32, 64], [64, 256, 512]),
        (Density.DOUBLING, [2, 8, 16, 32, 64], [64, 128, 256, 512]),
        (Density.FINE, [2, 5, 8, 12, 16, 24, 32, 48, 64], [64, 96, 128, 192, 256, 384, 512]),
    ],
)
def test_density_trades_programs_for_padding(density: Density, decode: list, mixed: list) -> None:
    rows, tokens = sizes(make_ladder(max_batch_tokens=512, max_rows=64, density=density))
    assert (rows, [count for count, _ in tokens]) == (decode, mixed)


@pytest.mark.parametrize("density", Density)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (64, 2), (65, 3), (100, 9), (8192, 1024)])
def test_every_density_ends_with_the_budgets(density: Density, tokens: int, rows: int) -> None:
    ladder = make_ladder(max_batch_tokens=tokens, max_rows=rows, density=density)
    assert (ladder.decode[-1].rows, ladder.mixed[-1].tokens) == (max(rows, 2), max(tokens, 64))
    assert list(ladder.buckets) == sorted(set(ladder.buckets))


def test_rungs_that_are_given_are_kept_below_the_budgets() -> None:
    given = {"decode_rungs": (3, 7), "mixed_rungs": (5, 48, 512)}
    assert sizes(make_ladder(max_batch_tokens=100, max_rows=9, **given)) == ([3, 7, 9], [(5, 5), (48, 9), (100, 9)])
    assert sizes(make_ladder(max_batch_tokens=48, max_rows=7, **given)) == ([3, 7], [(5, 5), (48, 7)])
    assert sizes(make_ladder(max_batch_tokens=4, max_rows=2, **given)) == ([2], [(4, 2)])


def test_without_decode_programs_every_step_is_mixed() -> None:
    ladder = make_ladder(max_batch_tokens=128, max_rows=8, decode=False)
    assert sizes(ladder) == ([], [(64, 8), (128, 8)])
    assert ladder.select(make_batch([1])) == ladder.mixed[0]


@pytest.mark.parametrize(
    ("counts", "kind", "tokens"),
    [
        ([1], "decode", 2),
        ([1] * 2, "decode", 2),
        ([1] * 3, "decode", 8),
        ([1] * 9, "decode", 16),
        ([1] * 20, "decode", 20),
        ([2], "mixed", 64),
        ([63, 1], "mixed", 64),
        ([63, 2], "mixed", 128),
        ([10] * 20, "mixed", 200),
    ],
)
def test_the_smallest_bucket_that_fits_is_chosen(counts: list[int], kind: str, tokens: int) -> None:
    bucket = make_ladder(max_batch_tokens=200, max_rows=20).select(make_batch(counts))
    assert (bucket.kind, bucket.tokens) == (kind, tokens)


def test_a_batch_beyond_the_budgets_has_no_bucket() -> None:
    ladder = make_ladder(max_batch_tokens=64, max_rows=8)
    with pytest.raises(ValueError, match="9 rows with 9 tokens fit no bucket"):
        ladder.select(make_batch([1] * 9))
    with pytest.raises(ValueError, match="1 rows with 65 tokens fit no bucket"):
        ladder.select(make_batch([65]))


@pytest.mark.parametrize(("max_rows", "max_batch_tokens"), [(1, 1), (3, 5), (8, 64), (9, 65), (33, 150)])
def test_every_step_within_the_budgets_has_a_bucket(max_rows: int, max_batch_tokens: int) -> None:
    ladder = make_ladder(max_batch_tokens=max_batch_tokens, max_rows=max_rows)
    rng = random.Random(0)
    for _ in range(300):
        rows = rng.randint(1, min(max_rows, max_batch_tokens))
        counts = [1] * rows
        for _ in range(rng.choice([0, 1, max_batch_tokens - rows])):
            if sum(counts) < max_batch_tokens:
                counts[rng.randrange(rows)] += 1
        bucket = ladder.select(make_batch(counts))
        assert bucket.fits(make_batch(counts))
        assert not any(other.fits(make_batch(counts)) for other in ladder.buckets[: ladder.buckets.index(bucket)])


@pytest.mark.parametrize("seed", range(40))
def test_what_a_job_uses_was_foreseen(seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng, rng.choice(POLICIES))
    loop = Loop(config, depth=seed % 4)
    for _ in range(rng.randint(1, 8)):
        loop.add(*random_size(rng, config))
    loop.run()
    requests = loop.requests.values()
    tokens = sum(request.num_cells for request in requests)
    assert set(loop.buckets) <= set(loop.ladder.reachable(num_requests=len(requests), num_tokens=tokens))


def test_what_is_foreseen_ends_with_the_largest_step() -> None:
    config = make_config(num_blocks=400, max_batch_tokens=512, max_requests_per_batch=32)
    for num_requests, prompt in [(1, 3), (3, 10), (3, 50), (9, 20), (20, 25)]:
        loop = Loop(config)
        for _ in range(num_requests):
            loop.add(prompt, 2)
        loop.run()
        foreseen = loop.ladder.reachable(num_requests=num_requests, num_tokens=num_requests * prompt)
        assert set(loop.buckets) <= set(foreseen)
        assert max(bucket.tokens for bucket in foreseen) == max(bucket.tokens for bucket in loop.buckets)


@pytest.mark.parametrize("budget", [1, 16, 64, 100, 256])
@pytest.mark.parametrize("max_new_tokens", [1, 3])
@pytest.mark.parametrize("prompt", [1, 2, 5, 16, 17, 33, 63, 64, 65, 100, 101, 102, 128, 165, 201, 257, 300, 320])
def test_what_one_request_alone_uses_is_foreseen_exactly(prompt: int, max_new_tokens: int, budget: int) -> None:
    loop = Loop(make_config(num_blocks=100, max_batch_tokens=budget))
    loop.add(prompt, max_new_tokens)
    loop.run()
    foreseen = loop.ladder.reachable_alone(prompt, max_new_tokens)
    assert len(set(foreseen)) == len(foreseen)
    assert set(foreseen) == set(loop.buckets)
