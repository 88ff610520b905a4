"""The jitted step: (params, kv, slot state, packed descriptor) -> (outputs, kv, slot state).

A mixed program is one step. A decode program is a loop over a window of steps, whose number is known at run time: plain
decode is a window of one. A row that has ended (an EOS id, no draw left, logits that are not finite) is padding from
then on: it writes the write trash and reads nothing. The loop ends when all rows have ended.

The slot state (the *carry*) lives on the device and is addressed by slot, so that a decode row's input never comes from
the host: one program per bucket, whatever batch came before. Rows that emit nothing and padding write its last row, the
trash slot. Everything in it can be rebuilt from a request's history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cbjax.attention import Attend, PagedAttend, StoreSpec
from cbjax.descriptor import BatchDescriptor, Bucket, unpack
from cbjax.sampling.sample import Sampled, sample
from cbjax.scheduler import MAX_WINDOW


class Model(Protocol):
    """What the engine serves: two methods, and every layer calls `attend` once (see `cbjax.attention.Attend`)."""

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """i32[tokens], i32[tokens] -> [tokens, hidden]."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[rows, hidden] -> [rows, vocab]."""
        ...


# From the parameters a step is given to the model that holds them; called once per trace.
type Bind = Callable[[Any], Model]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """Attributes:
    last_token: i32[slots + 1], the last token sampled for the slot.
    goes_on: bool[slots + 1], False once that was an EOS id or its logits were not finite: what is planned for the slot
        before the host has read it runs in vain.
    table: i32[groups, slots + 1, max_blocks], block ids; `num_blocks` where the block has left the group's window.
        Entries beyond a row's context are never followed.
    """

    last_token: jax.Array
    goes_on: jax.Array
    table: jax.Array


class StepResult(NamedTuple):
    """tokens i32[steps, rows], logprobs f32[steps, rows], finite bool[steps, rows]: `MAX_WINDOW` steps or one.

    Steps that did not run, and rows that had ended, have zeros and are finite.
    """

    tokens: jax.Array
    logprobs: jax.Array
    finite: jax.Array


def initial_slots(*, num_slots: int, num_groups: int, max_blocks: int, num_blocks: int) -> SlotState:
    """No tokens; every table entry names the read trash."""
    return SlotState(
        last_token=jnp.zeros(num_slots + 1, jnp.int32),
        goes_on=jnp.ones(num_slots + 1, jnp.bool_),
        table=jnp.full((num_groups, num_slots + 1, max_blocks), num_blocks, jnp.int32),
    )


def make_step(bind: Bind, bucket: Bucket, store: StoreSpec, num_words: int) -> Callable:
    """The step of one bucket, to be jitted with its second and third argument donated."""

    def step(
        params: Any, kv: list[jax.Array], slots: SlotState, packed: jax.Array
    ) -> tuple[StepResult, list[jax.Array], SlotState]:
        batch = unpack(packed, bucket, num_words)
        # Read once: with a window of steps the program's loop carries what it changes.
        carry = _Carry(
            step=jnp.int32(0),
            kv=kv,
            tokens=_input_tokens(slots, batch, bucket),
            last=slots.last_token[batch.slot],
            goes_on=~batch.carried | slots.goes_on[batch.slot],
            results=_no_results(MAX_WINDOW if bucket.kind == "decode" else 1, bucket.rows),
        )
        if bucket.kind == "decode":
            carry = jax.lax.while_loop(
                lambda carry: (carry.step < batch.window) & jnp.any(_runs(carry, batch)),
                lambda carry: _decode(bind(params), carry, slots, batch, bucket, store),
                carry,
            )
        else:
            carry, sampled = _forward(bind(params), carry, slots, batch, bucket, store, batch.context_len)
            carry = _advance(carry, sampled, batch, _runs(carry, batch))
        trash = slots.last_token.shape[0] - 1
        writes = jnp.where(batch.emits, batch.slot, trash)
        slots = SlotState(
            last_token=slots.last_token.at[writes].set(carry.last),
            goes_on=slots.goes_on.at[writes].set(carry.goes_on),
            table=slots.table,
        )
        return carry.results, carry.kv, slots

    return step


class _Carry(NamedTuple):
    """What a step leaves to the next one of its window.

    Attributes:
      step: i32, steps that ran.
      kv: the store's arrays.
      tokens: i32[tokens], input ids.
      last: i32[rows], the token sampled last.
      goes_on: bool[rows], it was none that ends the row.
      results: of the steps that ran.
    """

    step: jax.Array
    kv: list[jax.Array]
    tokens: jax.Array
    last: jax.Array
    goes_on: jax.Array
    results: StepResult


def _no_results(steps: int, rows: int) -> StepResult:
    return StepResult(
        tokens=jnp.zeros((steps, rows), jnp.int32),
        logprobs=jnp.zeros((steps, rows), jnp.float32),
        finite=jnp.ones((steps, rows), jnp.bool_),
    )


def _runs(carry: _Carry, batch: BatchDescriptor) -> jax.Array:
    """bool[rows], who takes part in the next step: a row that draws nothing (an unfinished prompt) in the first one."""
    row = jnp.arange(batch.slot.shape[0], dtype=jnp.int32)
    return (row < batch.num_rows) & carry.goes_on & (carry.step < jnp.maximum(batch.draws, 1))


def _decode(
    model: Model, carry: _Carry, slots: SlotState, batch: BatchDescriptor, bucket: Bucket, store: StoreSpec
) -> _Carry:
    """One step of a window."""
    runs = _runs(carry, batch)
    context = jnp.where(runs, batch.context_len + carry.step, 0)
    carry, sampled = _forward(model, carry, slots, batch, bucket, store, context)
    return _advance(carry, sampled, batch, runs)


def _forward(
    model: Model,
    carry: _Carry,
    slots: SlotState,
    batch: BatchDescriptor,
    bucket: Bucket,
    store: StoreSpec,
    context_len: jax.Array,
) -> tuple[_Carry, Sampled]:
    """Computes and samples once; `context_len` i32[rows] is 0 in rows that are padding."""
    steps = store.prepare(
        slots.table,
        batch.slot,
        batch.q_start,
        context_len,
        batch.num_rows,
        num_tokens=bucket.tokens,
        single_token_rows=bucket.kind == "decode",
    )
    attend = PagedAttend(carry.kv, steps, store)
    hidden = model.hidden(carry.tokens, steps[0].position, attend)
    last = jnp.maximum(batch.q_start[1:] - 1, 0)
    with jax.named_scope("logits"):
        logits = model.logits(hidden[last]).astype(jnp.float32)
    with jax.named_scope("sample"):
        # A row that emits nothing (an unfinished prompt) asks nothing of the sampler: zero words are greedy.
        words = jnp.where((batch.emits & (context_len > 0))[None, :], batch.words, jnp.uint32(0))
        sampled = sample(logits, words, batch.output_index + carry.step)
    return carry._replace(kv=attend.kv), sampled


def _advance(carry: _Carry, sampled: Sampled, batch: BatchDescriptor, runs: jax.Array) -> _Carry:
    """After a step in which the rows `runs` took part."""
    draws = runs & batch.emits
    is_end = jnp.any(sampled.tokens[None, :] == batch.eos, axis=0) | ~sampled.finite
    results = StepResult(
        tokens=_put(carry.results.tokens, carry.step, jnp.where(draws, sampled.tokens, 0)),
        logprobs=_put(carry.results.logprobs, carry.step, jnp.where(draws, sampled.logprobs, 0.0)),
        finite=_put(carry.results.finite, carry.step, sampled.finite | ~runs),
    )
    last = jnp.where(draws, sampled.tokens, carry.last)
    return _Carry(
        step=carry.step + 1,
        kv=carry.kv,
        tokens=last if carry.tokens.shape == last.shape else carry.tokens,
        last=last,
        goes_on=carry.goes_on & ~(draws & is_end),
        results=results,
    )


def _put(rows: jax.Array, step: jax.Array, values: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(rows, values, step, axis=0)


def _input_tokens(slots: SlotState, batch: BatchDescriptor, bucket: Bucket) -> jax.Array:
    """The descriptor's tokens, with the slot's last output where a row carries on from it."""
    carried = slots.last_token[batch.slot]
    if bucket.kind == "decode":
        return jnp.where(batch.carried, carried, batch.tokens)
    # One place more than there are tokens takes the writes of the rows that carry nothing.
    where = jnp.where(batch.carried, batch.q_start[:-1], bucket.tokens)
    return jnp.append(batch.tokens, jnp.zeros(1, jnp.int32)).at[where].set(carried)[: bucket.tokens]


def write_table(table: jax.Array, entries: jax.Array) -> jax.Array:
    """`SlotState.table` with i32[4, entries] written: group, slot, column, block. Padding names the trash slot."""
    group, slot, column, block = entries
    return table.at[group, slot, column].set(block)
