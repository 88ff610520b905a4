"""Runs the probe through every program and compares bits: sampled tokens, logprobs, and the KV cells written.

The largest mixed program is the measure, since it can take every step: what it writes and answers for one sequence must
come back, bit for bit, from every other program and from itself when the sequence is cut and batched otherwise. A
program that differs is left out of the ladder, and its steps take a larger one.

If any differs, the whole ladder is compiled once more with products of `ProductForm.TILES`, and the form that keeps
more programs stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from cbjax.descriptor import Bucket, build, pack
from cbjax.invariance.probe import Piece, Probe, arrangements, make_probe, whole
from cbjax.ladder import Ladder
from cbjax.models.products import ProductForm
from cbjax.programs import ModelDevice, Program
from cbjax.step import SlotState

type Compile = Callable[[Sequence[Bucket]], object]


class InvarianceError(RuntimeError):
    """No program of a model gives the same bits whatever else is in its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found.

    Attributes:
      products: the form in which the ladder's programs compute products.
      num_programs: compared.
      differing: programs that must not be used, with what differed.
    """

    products: ProductForm
    num_programs: int
    differing: Mapping[Bucket, str]

    @property
    def used(self) -> str:
        return f"{self.num_programs - len(self.differing)} of {self.num_programs} programs"

    @property
    def why(self) -> str:
        """For people."""
        if not self.differing:
            return f"all give the same bits, with products in {self.products.value}"
        left_out = "; ".join(f"{bucket}: {reason}" for bucket, reason in self.differing.items())
        return f"the same bits, with products in {self.products.value}; left out: {left_out}"


def prove(device: ModelDevice, ladder: Ladder, compile: Compile, *, vocab_size: int, max_positions: int) -> Proof:
    """Compiles and compares the whole ladder, and leaves the programs of the better form in the device.

    Overwrites any block and, like a step, must not run beside one: it is to be called before there are requests.

    Raises:
      InvarianceError: the largest mixed program itself differs with the arrangement, in every form.
      ValueError: the pool has less than a block per layer group.
    """
    device.recover()  # an earlier attempt may have been interrupted
    reference = ladder.mixed[-1]
    probe = make_probe(device.config, reference, vocab_size=vocab_size, max_positions=max_positions)
    tried: list[tuple[Proof, dict[Bucket | str, Program]]] = []
    for form in (ProductForm.ROWS, ProductForm.TILES):
        device.use_products(form)
        compile(ladder.buckets)
        differing = _differing(_Bench(device, probe), ladder.buckets, reference)
        proof = Proof(products=form, num_programs=len(ladder.buckets), differing=differing)
        tried.append((proof, dict(device.programs)))
        if not differing:
            break
    # The first of equals, which is the faster.
    best, programs = min(tried, key=lambda tried: len(tried[0].differing))
    if reference in best.differing:
        raise InvarianceError(
            f"batch_invariant=True cannot be had: {reference}, which every step must be able to take, gives other bits "
            f"for the same tokens in another batch: {best.differing[reference]}. Leave batch_invariant off, or look "
            "for what in the model or its backend depends on the number or the order of rows"
        )
    device.use_products(best.products)
    device.programs |= programs
    return best


def _differing(bench: _Bench, buckets: Sequence[Bucket], reference: Bucket) -> dict[Bucket, str]:
    """Which programs differ, and how; if the reference does, there is nothing to compare the others with."""
    bench.measure(reference)
    found = {bucket: reason for bucket in buckets if (reason := bench.difference(bucket))}
    if reference in found:
        return dict.fromkeys(buckets, found[reference])
    return found


@dataclass(slots=True)
class _Bench:
    """A device and what its reference gave.

    Attributes:
      cells: of the sequence's blocks, one array per array of the store, like it but for the number of blocks.
      answers: i32/u32 bits of each query's token and logprob.
    """

    device: ModelDevice
    probe: Probe
    cells: list[np.ndarray] = field(default_factory=list)
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)

    def measure(self, reference: Bucket) -> None:
        for pieces in whole(self.probe, reference):
            self.answers |= dict(self._run(reference, pieces, quiet_mates=False))
        self.cells = self._read()

    def difference(self, bucket: Bucket) -> str:
        """The first difference from what was measured; empty if there is none."""
        device, blocks = self.device, self.probe.blocks.ravel()
        device.cache.kv = _write(device.cache.kv, blocks, self.cells, axis=device.cache.block_axis)
        for number, pieces in enumerate(arrangements(self.probe, bucket)):
            answers = self._run(bucket, pieces, quiet_mates=number % 2 == 1)
            if difference := self._cell_difference():
                return difference
            for query, answer in answers:
                for what, mine, right in zip(("token", "logprob"), answer, self.answers[query], strict=True):
                    if mine != right:
                        return f"another {what} after position {self.probe.queries[query]}"
        return ""

    def _run(self, bucket: Bucket, pieces: Sequence[Piece], *, quiet_mates: bool) -> list[tuple[int, tuple[int, int]]]:
        """Runs one step; returns each answered query with the bits of its token and logprob."""
        device, trash = self.device, self.device.config.max_requests_per_batch
        batch = build(self.probe.batch(pieces, quiet_mates=quiet_mates), bucket, trash)
        slots = SlotState(
            last_token=jnp.zeros(trash + 1, jnp.int32),
            goes_on=jnp.ones(trash + 1, jnp.bool_),
            table=jnp.asarray(self.probe.table),
        )
        call = device.programs[bucket].call
        result, device.cache.kv, _ = call(device.weights, device.cache.kv, slots, pack(batch))
        tokens, logprobs = np.asarray(result.tokens)[0], np.asarray(result.logprobs)[0].view(np.uint32)
        rows = [(row, piece.query) for row, piece in enumerate(pieces) if piece.query is not None]
        return [(query, (int(tokens[row]), int(logprobs[row]))) for row, query in rows]

    def _read(self) -> list[np.ndarray]:
        cache, blocks = self.device.cache, self.probe.blocks.ravel()
        return [np.asarray(array) for array in _read(cache.kv, blocks, axis=cache.block_axis)]

    def _cell_difference(self) -> str:
        found = []
        for array, (mine, right) in enumerate(zip(self._read(), self.cells, strict=True)):
            differs = _bits(mine) != _bits(right)
            # In every layout a block's tokens are the last axis but one.
            places = {self.device.cache.block_axis, differs.ndim - 2}
            differs = differs.any(axis=tuple(set(range(differs.ndim)) - places))
            for block, offset in np.argwhere(differs)[:1].tolist():
                group, column = divmod(block, self.probe.blocks.shape[1])
                layer = self.device.cache.groups.places.index((group, array))
                found.append((layer, column * self.device.cache.block_size + offset))
        return "other keys or values in layer {} at position {}".format(*min(found)) if found else ""


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.itemsize}"))


@partial(jax.jit, static_argnames="axis")
def _read(kv: list[jax.Array], ids: jax.Array, *, axis: int) -> list[jax.Array]:
    """Blocks i32[blocks] of every array of the store, whose blocks are this axis."""
    at = (*(slice(None),) * axis, ids)
    return [array.at[at].get(mode="promise_in_bounds") for array in kv]


@partial(jax.jit, donate_argnums=0, static_argnames="axis")
def _write(kv: list[jax.Array], ids: jax.Array, cells: list[jax.Array], *, axis: int) -> list[jax.Array]:
    """The store with these blocks in it."""
    at, written = (*(slice(None),) * axis, ids), zip(kv, cells, strict=True)
    return [array.at[at].set(blocks, mode="promise_in_bounds") for array, blocks in written]
