"""The jitted step: (params, kv, slot state, descriptor) -> (outputs, kv, slot state).

The slot state (the *carry*) lives on the device and is addressed by slot, so that a decode row's input never comes from
the host: one program per bucket, whatever batch came before. Rows that emit nothing and padding write its last row, the
trash slot. Everything in it can be rebuilt from a request's history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cbjax.attention import Attend, LayerGroups, PagedAttend, prepare_batch
from cbjax.descriptor import BatchDescriptor, Bucket
from cbjax.sampling.sample import sample


class Model(Protocol):
    """What the engine serves: two methods, and every layer calls `attend` once (see `cbjax.attention.Attend`)."""

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """i32[tokens], i32[tokens] -> [tokens, hidden]."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[rows, hidden] -> [rows, vocab]."""
        ...


# From the parameters a step is given to the model that holds them; called once per trace.
type Bind = Callable[[dict], Model]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """Attributes:
    last_token: i32[slots + 1], the last token sampled for the slot.
    table: i32[groups, slots + 1, max_blocks], block ids; `num_blocks` where the block has left the group's window.
        Entries beyond a row's context are never followed.
    """

    last_token: jax.Array
    table: jax.Array


class StepResult(NamedTuple):
    """Per row of the bucket: tokens i32[rows], logprobs f32[rows], finite bool[rows]."""

    tokens: jax.Array
    logprobs: jax.Array
    finite: jax.Array


def initial_slots(*, num_slots: int, num_groups: int, max_blocks: int, num_blocks: int) -> SlotState:
    """No tokens; every table entry names the read trash."""
    return SlotState(
        last_token=jnp.zeros(num_slots + 1, jnp.int32),
        table=jnp.full((num_groups, num_slots + 1, max_blocks), num_blocks, jnp.int32),
    )


def make_step(bind: Bind, bucket: Bucket, groups: LayerGroups) -> Callable:
    """The step of one bucket, to be jitted with its second and third argument donated."""

    def step(
        params: dict, kv: list[jax.Array], slots: SlotState, batch: BatchDescriptor
    ) -> tuple[StepResult, list[jax.Array], SlotState]:
        model = bind(params)
        # What does not depend on a group's table is the same in all of them, and the compiler keeps one.
        pages = [
            prepare_batch(
                slots.table[group],
                batch.slot,
                batch.q_start,
                batch.context_len,
                batch.num_rows,
                num_tokens=bucket.tokens,
                block_size=kv[0].shape[3],
                num_blocks=kv[0].shape[2] - 2,
                single_token_rows=bucket.kind == "decode",
            )
            for group in range(len(groups.windows))
        ]
        attend = PagedAttend(kv, pages, groups)
        hidden = model.hidden(_input_tokens(slots, batch, bucket), pages[0].position, attend)
        last = jnp.maximum(batch.q_start[1:] - 1, 0)
        with jax.named_scope("logits"):
            logits = model.logits(hidden[last]).astype(jnp.float32)
        with jax.named_scope("sample"):
            # A row that emits nothing (an unfinished prompt) asks nothing of the sampler: zero words are greedy.
            words = jnp.where(batch.emits[None, :], batch.words, jnp.uint32(0))
            sampled = sample(logits, words, batch.output_index)
        trash = slots.last_token.shape[0] - 1
        writes = jnp.where(batch.emits, batch.slot, trash)
        slots = SlotState(last_token=slots.last_token.at[writes].set(sampled.tokens), table=slots.table)
        return StepResult(sampled.tokens, sampled.logprobs, sampled.finite), attend.kv, slots

    return step


def _input_tokens(slots: SlotState, batch: BatchDescriptor, bucket: Bucket) -> jax.Array:
    """The descriptor's tokens, with the slot's last output where a row carries on from it."""
    carried = slots.last_token[batch.slot]
    if bucket.kind == "decode":
        return jnp.where(batch.carried, carried, batch.tokens)
    # One place more than there are tokens takes the writes of the rows that carry nothing.
    where = jnp.where(batch.carried, batch.q_start[:-1], bucket.tokens)
    return jnp.append(batch.tokens, jnp.zeros(1, jnp.int32)).at[where].set(carried)[: bucket.tokens]


def write_table(slots: SlotState, group: jax.Array, slot: jax.Array, column: jax.Array, block: jax.Array) -> SlotState:
    """Writes block-table entries, i32[entries] each; padding names the trash slot."""
    return SlotState(last_token=slots.last_token, table=slots.table.at[group, slot, column].set(block))
