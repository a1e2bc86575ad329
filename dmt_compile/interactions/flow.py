"""Questions about a tape that the kinds of interaction share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .labels import DENSE
from .records import Kind
from .tape import Op, Tape

_CALM = ("move", "unary", "norm")
_SUMS = (*_CALM, "reduce", "add")


@dataclass
class Group:
    """Operators that make up one interaction: those that take its block, and all that belong to it."""

    kind: Kind
    variant: str
    main: list[Op]
    ops: list[Op] = field(default_factory=list)


def is_calm(op: Op) -> bool:
    """Whether an operator only moves and scales values."""
    return op.family in _CALM


def behind(tape: Tape, number: int, families: Sequence[str] = _CALM) -> Op | None:
    """The first operator, going back from a value along one labelled input, of another family."""
    return tape.makers.get(tape.back(number, lambda op: op.family in families and not op.mixes))


def weighted_by_softmax(tape: Tape, number: int) -> Op | None:
    """The softmax that a value comes from without anything but moves, scaling and dropout between."""
    op = behind(tape, number)
    return op if op is not None and op.family == "softmax" else None


def projected(tape: Tape, number: int) -> bool:
    """Whether a value is made of looked-up vectors by a layer that takes each of them by itself."""
    while True:
        op = tape.makers.get(number)
        if op is None or op.mixes or tape.own(number) <= {DENSE}:
            return False
        taken = tape.labelled(op)
        if op.family == "linear":
            return True
        if len(set(taken)) != 1:
            return False
        if op.family == "reduce":
            # A kernel written as a product with a parameter and a sum.
            scaled = tape.makers.get(taken[0])
            return scaled is not None and scaled.family == "unary" and tape.values[scaled.outs[0]].numel > tape.values[number].numel
        if op.family not in ("move", "unary", "norm", "nonlinear"):
            return False
        number = taken[0]


def ends(tape: Tape, ops: Iterable[Op]) -> tuple[set[int], set[int]]:
    """How far results are only moved, scaled and summed with each other: all these values, and those where that ends."""
    reach = {number for op in ops for number in op.outs}
    start = min((op.index for op in ops), default=0)
    absorbed: set[int] = set()
    for op in tape.ops[start:]:
        taken = tape.labelled(op)
        if taken and op.family in _SUMS and not op.mixes and all(number in reach for number in taken):
            reach.update(op.outs)
            absorbed.add(op.index)
    last = set()
    for number in reach:
        users = tape.users.get(number, ())
        # Who only looks at the shape, or compares, takes nothing on.
        if not users or any(user.index not in absorbed and any(map(tape.present, user.outs)) for user in users):
            last.add(number)
    return reach, last


def contraction(tape: Tape, op: Op) -> int:
    """How many terms each result of a linear layer or a product sums up."""
    if "conv" in op.name:
        return tape.values[op.ins[0]].shape[1]
    left = op.ins[1] if op.name in ("addmm", "baddbmm", "addmv") else op.ins[0]
    shape = tape.values[left].shape
    return shape[-1] if shape else 1


def next_linear(tape: Tape, numbers: Iterable[int]) -> Op | None:
    """The first linear layer that takes these values as they are."""
    found = [op for _, op in tape.after(numbers, is_calm) if op.family == "linear"]
    return min(found, key=lambda op: op.index, default=None)
