"""Every compiled program of an engine, and the device state they work on.

The set is known from the ladder: one step per bucket, one that writes block-table entries, and with a host tier one
each that takes blocks out of the store and puts them back. A program that is missing is compiled when it is first
needed, counted, and in strict mode refused. Shapes can never be compiled by accident, since only ahead-of-time compiled
executables are called.

One thread dispatches, in a plan's order: what goes to the host, what comes back, copies, then the step. Each takes the
store that the one before left behind, so whatever a block is used for next, its old content is read before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from cbjax.cache import (
    HostTier,
    PagedAttentionCache,
    blocks_per_call,
    calls,
    copy_blocks,
    gather_blocks,
    reads_first,
    scatter_blocks,
)
from cbjax.descriptor import BatchDescriptor, Bucket, abstract
from cbjax.host_memory import give_back_freed_memory
from cbjax.models.products import ProductForm, product_form
from cbjax.scheduler import Offload, Restore, SchedulerConfig, TableDelta
from cbjax.step import Bind, SlotState, StepResult, initial_slots, make_step, write_table

# Entries one call writes; more are written by more calls, so that one program serves all.
TABLE_ENTRIES = 256
# Programs other than steps, with their names for people.
_OTHERS = {
    "table": "block-table entries",
    "gather": "blocks to the host",
    "scatter": "blocks from the host",
    "copy": "copies of blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled program.

    Attributes:
      name: for people.
      call: the executable.
      seconds: spent on tracing and compiling.
      temp_bytes: temporaries by the compiler's own analysis; 0 where the backend does not tell.
    """

    name: str
    call: Callable
    seconds: float
    temp_bytes: int


class StrictModeError(RuntimeError):
    """A step needed a program that was not compiled at warm-up."""


class ModelDevice:
    """The device side of the engine: takes descriptors, keeps store and slot state, answers with device arrays.

    Attributes:
      params: weights, an argument of every step; new ones of the same shapes compile nothing.
      cache: the KV store.
      slots: the slot state.
      host_tier: where blocks are kept that lose their place; None: nowhere.
      products: how steps compute products with weights.
      strict: refuse to compile from now on.
      on_compiled: told the name and the seconds of each program that was compiled.
    """

    def __init__(
        self,
        bind: Bind,
        params: dict,
        cache: PagedAttentionCache,
        config: SchedulerConfig,
        *,
        host_tier: HostTier | None = None,
    ) -> None:
        self.bind, self.params, self.cache, self.config = bind, params, cache, config
        self.host_tier = host_tier
        self.products = ProductForm.FASTEST
        self.strict = False
        self.on_compiled: Callable[[str, float], object] = lambda name, seconds: None
        self.programs: dict[Bucket | str, Program] = {}
        self.slots = self._fresh_slots()

    def _fresh_slots(self) -> SlotState:
        config = self.config
        return initial_slots(
            num_slots=config.max_requests_per_batch,
            num_groups=config.num_groups,
            max_blocks=config.max_blocks_per_request,
            num_blocks=config.num_blocks,
        )

    def use_products(self, form: ProductForm) -> None:
        """Steps compute products in this form from now on; those that are compiled are forgotten."""
        self.products = form
        self.programs = {key: program for key, program in self.programs.items() if not isinstance(key, Bucket)}

    def missing(self, buckets: Iterable[Bucket], *, forks: bool = False) -> list[Bucket | str]:
        """Programs for these buckets that are not compiled yet, and with `forks` the one that copies blocks."""
        others = ["table"] + ["copy"] * forks + ["gather", "scatter"] * (self.host_tier is not None)
        wanted: list[Bucket | str] = [*others, *buckets]
        return [key for key in wanted if key not in self.programs]

    def compile(self, key: Bucket | str) -> Program:
        """Compiles one program.

        Raises:
          StrictModeError: in strict mode.
        """
        (program,) = self.compile_all([key])
        return program

    def compile_all(self, keys: Sequence[Bucket | str]) -> Iterator[Program]:
        """Compiles programs on as many threads as there are cores, and yields each when it is done.

        Raises:
          StrictModeError: in strict mode.
        """
        if self.strict and keys:
            names = ", ".join(map(str, keys))
            raise StrictModeError(f"strict mode: not compiled at warm-up, and needed now: {names}")
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="cbjax-compile")
        try:
            with _deep_stacks():
                # Tracing holds the interpreter, so it stays on this thread; the compiler does not.
                started = [pool.submit(_compile, key, *self._lower(key)) for key in keys]
            for done in as_completed(started):
                key, program = done.result()
                self.programs[key] = program
                self.on_compiled(program.name, program.seconds)
                yield program
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            give_back_freed_memory()

    def _lower(self, key: Bucket | str) -> tuple[jax.stages.Lowered, float]:
        """Traces a program; also the seconds that took."""
        start = time.perf_counter()
        kv = _shapes(self.cache.kv)
        if isinstance(key, Bucket):
            jitted = jax.jit(make_step(self.bind, key, self.cache.groups), donate_argnums=(1, 2))
            params, slots = _shapes((self.params, self.slots))
            with product_form(self.products):
                lowered = jitted.lower(params, kv, slots, abstract(key, self.config.num_words))
        elif key == "table":
            lowered = jax.jit(write_table, donate_argnums=0).lower(_shapes(self.slots), *[_ids(TABLE_ENTRIES)] * 4)
        else:
            lowered = _lower_block_program(key, kv, _ids(self._blocks_per_call))
        return lowered, time.perf_counter() - start

    def _program(self, key: Bucket | str) -> Callable:
        program = self.programs.get(key)
        return (program or self.compile(key)).call

    def update_table(self, delta: TableDelta) -> None:
        """Writes block-table entries, in as many calls of the one program as it takes."""
        trash = self.config.max_requests_per_batch
        all_entries = np.stack([delta.group, delta.slot, delta.column, delta.block])
        for first in range(0, len(delta), TABLE_ENTRIES):
            part = all_entries[:, first : first + TABLE_ENTRIES]
            entries = np.zeros((4, TABLE_ENTRIES), np.int32)
            entries[1] = trash
            entries[:, : part.shape[1]] = part
            self.slots = self._program("table")(self.slots, *entries)

    @property
    def _blocks_per_call(self) -> int:
        return blocks_per_call(self.cache.block_size)

    def offload(self, offload: Offload) -> None:
        """Copies blocks to the host tier; waits only where that is made of NumPy arrays."""
        assert self.host_tier is not None, "blocks go to a host tier that is off"
        assert offload.uid not in self.host_tier, f"uid {offload.uid} is offloaded and has a copy already"
        self.host_tier.keep(offload.uid, self._gathered(offload.blocks))

    def _gathered(self, ids: np.ndarray) -> Iterator[list[tuple[jax.Array, ...]]]:
        for part, call in calls(ids, self._blocks_per_call, padding=self.cache.num_blocks):
            yield self._program("gather")(self.cache.kv, call)[: part.stop - part.start]

    def restore(self, restore: Restore) -> None:
        """Brings blocks back from the host tier, whose copy is dropped; waits for nothing."""
        assert self.host_tier is not None, "blocks come from a host tier that is off"
        assert restore.uid in self.host_tier, f"uid {restore.uid} is restored and has no copy"
        assert len(restore.index) == len(restore.blocks), f"uid {restore.uid} restores other blocks than it names"
        size = self._blocks_per_call
        for part, call in calls(restore.blocks, size, padding=self.cache.num_blocks + 1):
            blocks = self.host_tier.fetch(restore.uid, restore.index[part])
            blocks += [blocks[0]] * (size - len(blocks))
            self.cache.kv = self._program("scatter")(self.cache.kv, blocks, call)
        self.host_tier.discard(restore.uid)

    def discard(self, uid: int) -> None:
        """Drops a request's copy in the host tier, if there is one."""
        if self.host_tier is not None:
            self.host_tier.discard(uid)

    def copy_blocks(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copies blocks within the store, i32[copies] each; every source is read before anything is written.

        Destinations are all different.
        """
        trash, size = self.cache.num_blocks, self._blocks_per_call
        for together in reads_first(sources, destinations, size):
            reads = calls(sources[together], size, padding=trash)
            writes = calls(destinations[together], size, padding=trash + 1)
            for (_, source), (_, destination) in zip(reads, writes, strict=True):
                self.cache.kv = self._program("copy")(self.cache.kv, source, destination)

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> StepResult:
        """Dispatches one step; returns without waiting for it."""
        call = self._program(bucket)
        result, self.cache.kv, self.slots = call(self.params, self.cache.kv, self.slots, batch)
        return result

    def recover(self) -> None:
        """After an interrupted dispatch: if a donated array is gone, fresh ones. Only with no request alive.

        So whatever the host tier still holds is nobody's.
        """
        if self.host_tier is not None:
            self.host_tier.clear()
        if self.cache.is_lost or self.slots.table.is_deleted() or self.slots.last_token.is_deleted():
            self.cache.reset()
            self.slots = self._fresh_slots()

    def close(self) -> None:
        """Gives the memory of store, slot state and host tier back."""
        if self.host_tier is not None:
            self.host_tier.clear()
        self.cache.close()
        for array in jax.tree.leaves(self.slots):
            if not array.is_deleted():
                array.delete()
        self.programs.clear()
        give_back_freed_memory()


def _compile(key: Bucket | str, lowered: jax.stages.Lowered, traced: float) -> tuple[Bucket | str, Program]:
    start = time.perf_counter()
    executable = lowered.compile()
    program = Program(
        name=str(key) if isinstance(key, Bucket) else _OTHERS[key],
        call=executable,
        seconds=traced + time.perf_counter() - start,
        temp_bytes=getattr(executable.memory_analysis(), "temp_size_in_bytes", 0),
    )
    return key, program


def _lower_block_program(key: str, kv: list[jax.ShapeDtypeStruct], ids: jax.ShapeDtypeStruct) -> jax.stages.Lowered:
    """One of the programs that move whole blocks, for a store and ids of these shapes."""
    if key == "gather":
        return jax.jit(gather_blocks).lower(kv, ids)
    if key == "scatter":
        return jax.jit(scatter_blocks, donate_argnums=0).lower(kv, jax.eval_shape(gather_blocks, kv, ids), ids)
    assert key == "copy", f"there is no program {key!r}"
    return jax.jit(copy_blocks, donate_argnums=0).lower(kv, ids, ids)


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads started inside have the 64 MiB of stack that XLA's recursion over large programs can need."""
    before = threading.stack_size(64 << 20)
    try:
        yield
    finally:
        threading.stack_size(before)


def _ids(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), np.int32)


def _shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
