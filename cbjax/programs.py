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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cbjax.cache import (
    CALLS_IN_FLIGHT,
    HostTier,
    PagedAttentionCache,
    blocks_per_call,
    calls,
    lower_block_program,
    reads_first,
)
from cbjax.descriptor import BatchDescriptor, Bucket, pack, packed_shape
from cbjax.host_memory import give_back_freed_memory
from cbjax.models import check_same_params
from cbjax.models.products import ProductForm, product_form
from cbjax.program_store import ProgramStore, StoredProgram, cache_hits
from cbjax.scheduler import Offload, Restore, SchedulerConfig, TableDelta
from cbjax.step import Bind, SlotState, StepResult, initial_slots, make_step, write_table

# Entries one call writes; more are written by more calls, so that one program serves all.
TABLE_ENTRIES = 256
# Programs other than steps: their names for people, and what they are for.
OTHER_PROGRAMS = {
    "table": ("block-table entries", "which blocks a row has"),
    "copy": ("copies of blocks", "continuations of one prompt"),
    "gather": ("blocks to the host", "requests that lose their blocks"),
    "scatter": ("blocks from the host", "requests that get them back"),
}
type ProgramKey = Bucket | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled program.

    Attributes:
      name: for people.
      call: the executable.
      seconds: spent on tracing and compiling; of one that was on disk, on reading it.
      temp_bytes: temporaries by the compiler's own analysis; 0 where the backend does not tell.
      from_disk: it was read, not compiled.
    """

    name: str
    call: jax.stages.Compiled
    seconds: float
    temp_bytes: int
    from_disk: bool = False


class StrictModeError(RuntimeError):
    """A step needed a program that was not compiled at warm-up."""


class ModelDevice:
    """The device side of the engine: takes descriptors, keeps store and slot state, answers with device arrays.

    Attributes:
      weights: arguments of every step; new ones of the same shapes compile nothing. A list, since going through a
        model's nested dict takes a hundred microseconds.
      cache: the KV store.
      slots: the slot state.
      host_tier: where blocks are kept that lose their place; None: nowhere.
      products: how steps compute products with weights.
      strict: refuse to compile from now on.
      store: compiled programs on disk; None: none are kept there.
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
        store: ProgramStore | None = None,
    ) -> None:
        self.weights, self._structure = jax.tree.flatten(params)
        self.bind, self.cache, self.config = bind, cache, config
        self.host_tier, self.store = host_tier, store
        self.products = ProductForm.FASTEST
        self.strict = False
        self.on_compiled: Callable[[str, float], object] = lambda name, seconds: None
        self.programs: dict[ProgramKey, Program] = {}
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

    def all_keys(self, buckets: Iterable[Bucket], *, forks: bool = True) -> list[ProgramKey]:
        """Programs for these buckets and all that go with them; with `forks` the one that copies blocks."""
        return ["table"] + ["copy"] * forks + ["gather", "scatter"] * (self.host_tier is not None) + [*buckets]

    def missing(self, buckets: Iterable[Bucket], *, forks: bool = False) -> list[ProgramKey]:
        """Those of `all_keys` that are not compiled yet."""
        return [key for key in self.all_keys(buckets, forks=forks) if key not in self.programs]

    def known(self, key: ProgramKey) -> Program | StoredProgram | None:
        """A program that is compiled, or kept on disk; neither traces nor compiles."""
        return self.programs.get(key) or self._stored(key)

    def sizes(self, key: str) -> str:
        """What one call of a program other than a step takes, for people."""
        return f"{TABLE_ENTRIES} entries" if key == "table" else f"{self._blocks_per_call} blocks"

    def compile(self, key: ProgramKey) -> Program:
        """Compiles one program.

        Raises:
          StrictModeError: in strict mode.
        """
        (program,) = self.compile_all([key])
        return program

    def compile_all(self, keys: Sequence[ProgramKey]) -> Iterator[Program]:
        """Compiles programs on as many threads as there are cores, and yields each when it is done.

        Raises:
          StrictModeError: in strict mode.
        """
        if self.strict and keys:
            names = ", ".join(_name(key) for key in keys)
            there = ", ".join(program.name for program in self.programs.values()) or "none"
            raise StrictModeError(
                f"strict mode: not compiled at warm-up, and needed now: {names}; compiled are: {there}. Warm up what "
                "the workload can reach (session.warmup() compiles every program), or turn strict mode off"
            )
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="cbjax-compile")
        try:
            with _deep_stacks():
                # Tracing holds the interpreter, so it stays on this thread; the compiler does not.
                started = [self._start(pool, key) for key in keys]
            unreadable = []
            for done in as_completed(started):
                key, program = done.result()
                if program is None:
                    unreadable.append(key)
                    continue
                self.programs[key] = program
                self.on_compiled(program.name, program.seconds)
                yield program
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            give_back_freed_memory()
        if unreadable:
            yield from self.compile_all(unreadable)

    def _start(self, pool: ThreadPoolExecutor, key: ProgramKey) -> Future[tuple[ProgramKey, Program | None]]:
        """Has a program read from disk, or traces it and has it compiled."""
        if self.store is None:
            return pool.submit(_compile, key, *self._lower(key))
        path = self._path(self.store, key)
        if (stored := self.store.find(path)) is not None:
            return pool.submit(_read, key, self.store, stored)
        return pool.submit(_compile_and_keep, key, *self._lower(key), self.store, path)

    def _stored(self, key: ProgramKey) -> StoredProgram | None:
        return None if self.store is None else self.store.find(self._path(self.store, key))

    def _path(self, store: ProgramStore, key: ProgramKey) -> Path:
        """Everything that `_lower` makes a program from is in it."""
        if isinstance(key, Bucket):
            params = {"params": self._params(self.weights), "batch": packed_shape(key, self.config.num_words)}
            name = f"{key} of {self.cache.store!r} with {self.products.name}"
        else:
            params, name = {}, f"{key} of {self._blocks_per_call} blocks, {TABLE_ENTRIES} entries"
        return store.path(name, {"kv": self.cache.kv, "slots": self.slots, **params})

    def _lower(self, key: ProgramKey) -> tuple[jax.stages.Lowered, float]:
        """Traces a program; also the seconds that took."""
        start = time.perf_counter()
        kv = _shapes(self.cache.kv)
        if isinstance(key, Bucket):
            step = make_step(lambda w: self.bind(self._params(w)), key, self.cache.store, self.config.num_words)
            weights, slots = _shapes((self.weights, self.slots))
            with product_form(self.products):
                batch = packed_shape(key, self.config.num_words)
                lowered = jax.jit(step, donate_argnums=(1, 2)).lower(weights, kv, slots, batch)
        elif key == "table":
            entries = jax.ShapeDtypeStruct((4, TABLE_ENTRIES), np.int32)
            # A function of its own each time: of one that it knows, jax would hand out the executable that an earlier
            # session read from jax's cache, and not count that as a hit.
            lowered = jax.jit(partial(write_table), donate_argnums=0).lower(_shapes(self.slots.table), entries)
        else:
            lowered = lower_block_program(key, kv, _ids(self._blocks_per_call), self.cache.block_axis)
        return lowered, time.perf_counter() - start

    def _params(self, weights: Sequence[Any]) -> Any:
        """The weights as the nested dict that a model is bound to."""
        return jax.tree.unflatten(self._structure, weights)

    def check_params(self, params: Mapping[Any, Any]) -> None:
        """Raises ValueError, with the first difference, unless the programs can compute with these weights."""
        check_same_params(self._params(self.weights), params)

    def _program(self, key: ProgramKey) -> Callable:
        program = self.programs.get(key)
        return (program or self.compile(key)).call

    def update_table(self, delta: TableDelta) -> None:
        """Writes block-table entries, in as many calls of the one program as it takes."""
        if not len(delta):
            return
        trash = self.config.max_requests_per_batch
        all_entries = np.stack([delta.group, delta.slot, delta.column, delta.block])
        for first in range(0, len(delta), TABLE_ENTRIES):
            part = all_entries[:, first : first + TABLE_ENTRIES]
            entries = np.zeros((4, TABLE_ENTRIES), np.int32)
            entries[1] = trash
            entries[:, : part.shape[1]] = part
            # Only the table goes through: every other array would take as long to hand over.
            self.slots = replace(self.slots, table=self._program("table")(self.slots.table, entries))

    @property
    def _blocks_per_call(self) -> int:
        return blocks_per_call(self.cache.block_size)

    def offload(self, offload: Offload) -> None:
        """Copies blocks to the host tier; waits where that is made of NumPy arrays, and for long copies."""
        assert self.host_tier is not None, "blocks go to a host tier that is off"
        assert offload.uid not in self.host_tier, f"uid {offload.uid} is offloaded and has a copy already"
        self.host_tier.keep(offload.uid, self._gathered(offload.blocks))

    def _gathered(self, ids: np.ndarray) -> Iterator[list[tuple[jax.Array, ...]]]:
        for part, call in calls(ids, self._blocks_per_call, padding=self.cache.num_blocks):
            yield self._program("gather")(self.cache.kv, call)[: part.stop - part.start]

    def restore(self, restore: Restore) -> None:
        """Brings blocks back from the host tier, whose copy is dropped; waits after every `CALLS_IN_FLIGHT` calls."""
        assert self.host_tier is not None, "blocks come from a host tier that is off"
        assert restore.uid in self.host_tier, f"uid {restore.uid} is restored and has no copy"
        assert len(restore.index) == len(restore.blocks), f"uid {restore.uid} restores other blocks than it names"
        size = self._blocks_per_call
        parts = calls(restore.blocks, size, padding=self.cache.num_blocks + 1)
        for number, (part, call) in enumerate(parts, start=1):
            blocks = self.host_tier.fetch(restore.uid, restore.index[part])
            blocks += [blocks[0]] * (size - len(blocks))
            self.cache.kv = self._program("scatter")(self.cache.kv, blocks, call)
            if number % CALLS_IN_FLIGHT == 0:
                jax.block_until_ready(self.cache.kv)
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
        result, self.cache.kv, self.slots = call(self.weights, self.cache.kv, self.slots, pack(batch))
        for answer in result:
            answer.copy_to_host_async()  # on its way when the engine comes to read it
        return result

    def recover(self) -> None:
        """After an interrupt or an error: if a donated array is gone or a step failed, fresh arrays.

        Only with no request alive, so whatever the host tier still holds is nobody's. Waits for the steps in flight.
        """
        if self.host_tier is not None:
            self.host_tier.clear()
        if self.cache.is_lost or not _are_sound((self.cache.kv, self.slots)):
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


def _compile(key: ProgramKey, lowered: jax.stages.Lowered, traced: float) -> tuple[ProgramKey, Program]:
    start = time.perf_counter()
    return key, _program_of(key, lowered.compile(), traced + time.perf_counter() - start)


def _compile_and_keep(
    key: ProgramKey, lowered: jax.stages.Lowered, traced: float, store: ProgramStore, path: Path
) -> tuple[ProgramKey, Program]:
    before = cache_hits()
    _, program = _compile(key, lowered, traced)
    if cache_hits() == before:
        store.save(path, program.call, seconds=program.seconds, temp_bytes=program.temp_bytes)
    return key, program


def _read(key: ProgramKey, store: ProgramStore, stored: StoredProgram) -> tuple[ProgramKey, Program | None]:
    """None: it could not be read."""
    start = time.perf_counter()
    executable = store.load(stored)
    return key, executable and _program_of(key, executable, time.perf_counter() - start, from_disk=True)


def _program_of(
    key: ProgramKey, executable: jax.stages.Compiled, seconds: float, *, from_disk: bool = False
) -> Program:
    analysis = executable.memory_analysis()
    temp_bytes = getattr(analysis, "temp_size_in_bytes", 0)
    return Program(name=_name(key), call=executable, seconds=seconds, temp_bytes=temp_bytes, from_disk=from_disk)


def _name(key: ProgramKey) -> str:
    return str(key) if isinstance(key, Bucket) else OTHER_PROGRAMS[key][0]


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads started inside have the 64 MiB of stack that XLA's recursion over large programs can need."""
    before = threading.stack_size(64 << 20)
    try:
        yield
    finally:
        threading.stack_size(before)


def _are_sound(tree) -> bool:
    """Whether every array is there and the program that makes it succeeds."""
    if any(array.is_deleted() for array in jax.tree.leaves(tree)):
        return False
    try:
        jax.block_until_ready(tree)
    except (RuntimeError, ValueError):  # whatever the program that should have made them raised
        return False
    return True


def _ids(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), np.int32)


def _shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
