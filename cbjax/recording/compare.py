"""What is different in two recordings: their configs, the first input, and the first step that is planned otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from cbjax.recording.digest import field_names
from cbjax.recording.inputs import Add, Cancel, Input, Renew, Reset, Schedule, Start, Update
from cbjax.recording.player import Player, ReplayMismatch
from cbjax.recording.reader import Recording
from cbjax.scheduler import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Of two recordings, `this | other`, one line each; all empty if there are none.

    Attributes:
      inputs_step, inputs: before which step, and what: the first input that is not the same.
      plan_step, plan: which step, and what: the first plan that is not the same, as this version plans both.
    """

    inputs_step: int = 0
    inputs: tuple[str, ...] = ()
    plan_step: int = 0
    plan: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.plan)

    def __str__(self) -> str:
        """For people, one difference per line."""
        if not self:
            return "no difference: the same inputs and the same plans"
        lines = []
        if self.inputs:
            lines += [f"inputs differ first before step {self.inputs_step}:", *(f"  {line}" for line in self.inputs)]
        if self.plan:
            lines += [f"plans differ first at step {self.plan_step}:", *(f"  {line}" for line in self.plan)]
        else:
            lines.append("every plan is the same")
        return "\n".join(lines)


def compare(this: Recording, other: Recording) -> Differences:
    """Replays both as far as their plans are the same. Recorded digests play no part.

    Raises:
      Whatever the scheduler raises.
    """
    inputs_step, inputs = 0, ()
    for step, (mine, theirs) in enumerate(zip_longest(_stretches(this), _stretches(other))):
        if mine is None or theirs is None:
            left = this.name if theirs is None else other.name
            return Differences(
                inputs_step=inputs_step, inputs=inputs, plan_step=step - 1, plan=(f"only {left} goes on",)
            )
        if not inputs:
            inputs_step, inputs = step, tuple(_input_differences(mine[0], theirs[0]))
        one, another = mine[1], theirs[1]
        if one is not None and another is not None:
            plan = tuple(_plan_differences(one, another))
            if plan:
                return Differences(inputs_step=inputs_step, inputs=inputs, plan_step=step, plan=plan)
    return Differences(inputs_step=inputs_step, inputs=inputs)


def _stretches(recording: Recording) -> Iterator[tuple[list[Input], StepPlan | str | None]]:
    """For each step what came before it, and its plan or why there is none; at last what came after all steps."""
    player, since = Player(), []
    for given in recording.inputs:
        try:
            answer = player.apply(given)
        except ReplayMismatch as error:  # it was edited, or is of a version that plans otherwise
            yield since, f"{recording.name} cannot go on: {error}"
            return
        if isinstance(answer, StepPlan) and not answer.is_empty:
            yield since, answer
            since = []
        elif not isinstance(given, Schedule):
            since.append(given)
    yield since, None


def _plan_differences(mine: StepPlan | str, theirs: StepPlan | str) -> Iterator[str]:
    stuck = [plan for plan in (mine, theirs) if isinstance(plan, str)]
    yield from stuck or differences(mine, theirs, "plan")


def _input_differences(mine: Sequence[Input], theirs: Sequence[Input]) -> Iterator[str]:
    """Of the first input that is not the same."""
    for one, another in zip_longest(mine, theirs):
        if type(one) is not type(another):
            yield f"{_named(one)} | {_named(another)}"
            return
        found = list(differences(one, another, type(one).__name__.lower()))
        if found:
            if isinstance(one, Add | Cancel):
                yield f"{_named(one)} | {_named(another)}"
            yield from found
            return


def _named(given: Input | None) -> str:
    match given:
        case None:
            return "nothing"
        case Start():
            return "another engine"
        case Add(request=request):
            fork = "" if request.fork_of is None else f" as a fork of {request.fork_of}"
            return f"request {request.uid} of {len(request.prompt)} tokens{fork}"
        case Cancel(uid=uid):
            return f"cancel of {uid}"
        case Update(tokens=tokens):
            return f"answers of {len(tokens)} rows"
        case Renew():
            return "new weights"
        case Reset():
            return "reset"
        case Schedule():
            return "schedule"


def differences(mine: Any, theirs: Any, path: str) -> Iterator[str]:
    """Lines `path: mine | theirs`, one for each part that is not the same; of an array the first element."""
    if type(mine) is not type(theirs):
        yield f"{path}: {_short(mine)} | {_short(theirs)}"
    elif isinstance(mine, np.ndarray):
        yield from _array_differences(mine, theirs, path)
    elif isinstance(mine, tuple) and len(mine) == len(theirs):
        for i, (one, another) in enumerate(zip(mine, theirs, strict=True)):
            yield from differences(one, another, f"{path}[{i}]")
    elif is_dataclass(mine) and not hasattr(mine, "name"):  # a policy is known by its name
        for name in field_names(type(mine)):
            yield from differences(getattr(mine, name), getattr(theirs, name), f"{path}.{name}")
    elif mine != theirs:
        yield f"{path}: {_short(mine)} | {_short(theirs)}"


def _array_differences(mine: np.ndarray, theirs: np.ndarray, path: str) -> Iterator[str]:
    if mine.shape != theirs.shape:
        yield f"{path}: {_short(mine)} | {_short(theirs)}"
        return
    where = np.argwhere(mine != theirs)
    if len(where):
        first = tuple(where[0].tolist())
        more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
        yield f"{path}{list(first)}: {mine[first]} | {theirs[first]}{more}"


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{list(value.shape)} {np.array2string(value, threshold=8, edgeitems=3).replace('\n', '')}"
    text = repr(getattr(value, "name", value))
    return text if len(text) <= 60 else f"{text[:57]}..."
