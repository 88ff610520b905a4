"""A model whose steps compute nothing: what is left is the host's part, with everything else as it is.

Sessions run programs by their buckets, so a stub is a session whose programs do nothing. They take the very arguments
(weights, KV store, slot state, descriptor), give the donated ones back, and answer with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.device_queue import DeviceQueue
from cbjax import CausalLM, ContinuousBatchingConfig, WorkloadHints
from cbjax.descriptor import BatchDescriptor, Bucket, packed_shape
from cbjax.models import DecoderConfig, abstract_params, build
from cbjax.programs import ModelDevice, Program
from cbjax.scheduler import MAX_WINDOW
from cbjax.session import Session
from cbjax.step import StepResult

# As many layers as SmolLM2-135M, and so as many arrays, which are small.
_LAYERS = 30


def stub_model(*, max_positions: int = 8192) -> CausalLM:
    """A model with as many weights and layers as SmolLM2-135M has, all of them small."""
    config = DecoderConfig(
        vocab_size=49_152,
        hidden_size=16,
        intermediate_size=16,
        num_layers=_LAYERS,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=max_positions,
        tie_embeddings=True,
    )
    graphdef = build(config)
    # Zeros, since nothing computes with them and random ones take a minute to compile.
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(config))
    return CausalLM(lambda params: nnx.merge(graphdef, params), params, max_positions=max_positions, config=config)


def stub_session(lm: CausalLM, config: ContinuousBatchingConfig, hints: WorkloadHints) -> Session:
    """Has the model make the session that these ask for, and gives it programs that do nothing."""
    lm.compile_plan(config, hints)
    session = lm.session
    assert session is not None
    device = session.device
    for bucket in session.resolved.ladder.buckets:
        device.programs[bucket] = Program(name=str(bucket), call=_no_op(device, bucket), seconds=0.0, temp_bytes=0)
    return session


def put_behind(queue: DeviceQueue, device: ModelDevice) -> QueuedSteps:
    """Has each step of the device also take its turn in the queue, and answered when that is over."""
    steps = QueuedSteps(device.forward, queue)
    device.forward = steps
    return steps


def _no_op(device: ModelDevice, bucket: Bucket) -> jax.stages.Compiled:
    steps = MAX_WINDOW if bucket.kind == "decode" else 1

    def no_op(params, kv, slots, batch):
        shape = (steps, bucket.rows)
        nothing = StepResult(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.bool_))
        return nothing, kv, slots

    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (device.weights, device.cache.kv, device.slots)
    )
    jitted = jax.jit(no_op, donate_argnums=(1, 2), keep_unused=True)
    return jitted.lower(*arguments, packed_shape(bucket, device.config.num_words)).compile()


class QueuedSteps:
    """A device's `forward` whose steps take `seconds_per_step` in a queue.

    Attributes:
      seconds_per_step: set it before a run.
    """

    def __init__(self, forward: Callable[[BatchDescriptor, Bucket], StepResult], queue: DeviceQueue) -> None:
        self._forward, self._queue = forward, queue
        self.seconds_per_step = 0.0

    def __call__(self, batch: BatchDescriptor, bucket: Bucket) -> Any:
        result = self._forward(batch, bucket)
        job = self._queue.put(float(batch.window) * self.seconds_per_step)
        return StepResult(*(_Queued(array, job, self._queue) for array in result))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class _Queued:
    """An array that is there when its job is done; as much of `jax.Array` as the engine uses."""

    array: jax.Array
    job: int
    queue: DeviceQueue

    def is_ready(self) -> bool:
        return self.queue.is_done(self.job)

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self.queue.wait(self.job)
        return np.asarray(self.array)
