"""Every compiled program of an engine, and the device state they work on.

The set is known from the ladder: one step per bucket, and one that writes block-table entries. A program that is
missing is compiled when it is first needed, counted, and in strict mode refused. Shapes can never be compiled by
accident, since only ahead-of-time compiled executables are called.
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

from cbjax.cache import PagedAttentionCache
from cbjax.descriptor import BatchDescriptor, Bucket, abstract
from cbjax.host_memory import give_back_freed_memory
from cbjax.scheduler import SchedulerConfig, TableDelta
from cbjax.step import Bind, SlotState, StepResult, initial_slots, make_step, write_table

# Entries one call writes; more are written by more calls, so that one program serves all.
TABLE_ENTRIES = 256


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
      strict: refuse to compile from now on.
    """

    def __init__(self, bind: Bind, params: dict, cache: PagedAttentionCache, config: SchedulerConfig) -> None:
        self.bind, self.params, self.cache, self.config = bind, params, cache, config
        self.strict = False
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

    def missing(self, buckets: Iterable[Bucket]) -> list[Bucket | str]:
        """Programs for these buckets that are not compiled yet."""
        wanted: list[Bucket | str] = ["table", *buckets]
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
                yield program
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            give_back_freed_memory()

    def _lower(self, key: Bucket | str) -> tuple[jax.stages.Lowered, float]:
        """Traces a program; also the seconds that took."""
        start = time.perf_counter()
        if isinstance(key, Bucket):
            jitted = jax.jit(make_step(self.bind, key, self.cache.groups), donate_argnums=(1, 2))
            shapes = _shapes((self.params, self.cache.kv, self.slots))
            lowered = jitted.lower(*shapes, abstract(key, self.config.num_words))
        else:
            entries = jax.ShapeDtypeStruct((TABLE_ENTRIES,), np.int32)
            lowered = jax.jit(write_table, donate_argnums=0).lower(_shapes(self.slots), *[entries] * 4)
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

    def forward(self, batch: BatchDescriptor, bucket: Bucket) -> StepResult:
        """Dispatches one step; returns without waiting for it."""
        call = self._program(bucket)
        result, self.cache.kv, self.slots = call(self.params, self.cache.kv, self.slots, batch)
        return result

    def recover(self) -> None:
        """After an interrupted dispatch: if a donated array is gone, fresh ones. Only with no request alive."""
        if self.cache.is_lost or self.slots.table.is_deleted() or self.slots.last_token.is_deleted():
            self.cache.reset()
            self.slots = self._fresh_slots()

    def close(self) -> None:
        """Gives the device memory of store and slot state back."""
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
        name=str(key) if isinstance(key, Bucket) else "block-table entries",
        call=executable,
        seconds=traced + time.perf_counter() - start,
        temp_bytes=getattr(executable.memory_analysis(), "temp_size_in_bytes", 0),
    )
    return key, program


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Threads started inside have the 64 MiB of stack that XLA's recursion over large programs can need."""
    before = threading.stack_size(64 << 20)
    try:
        yield
    finally:
        threading.stack_size(before)


def _shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
