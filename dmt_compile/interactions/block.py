"""Which vectors an operator takes: from the labels of a value to the members of a block, in the order in which they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .flow import projected
from .labels import DENSE, MIXED
from .records import Block, BlockInput, Member
from .tape import Op, Tape, sample


@dataclass(frozen=True)
class Laid:
    """How vectors lie in a value: runs of (label, width), the axis that counts them, that of their columns, that of the batch."""

    runs: tuple[tuple[int, int], ...]
    vector_axis: int | None
    width_axis: int | None
    batch_axis: int | None


def laid(tape: Tape, number: int) -> Laid:
    """How the vectors of a value lie in it."""
    labels = tape.values[number].labels
    assert labels is not None
    one, batch_axis = sample(labels, tape.batch)

    def axis(place: int) -> int:
        return place + (batch_axis is not None and place >= batch_axis)

    vary = [place for place in range(one.dim()) if bool((one != one.select(place, 0).unsqueeze(place)).any())]
    still = [place for place in range(one.dim()) if place not in vary and one.shape[place] > 1]
    if not vary:
        # One vector, or several of the same feature.
        label = int(one.reshape(-1)[0]) if one.numel() else 0
        width = tape.sources[label].width if label in tape.sources else 0
        last = one.shape[-1] if one.dim() else 1
        size = last if label == DENSE or not width or projected(tape, number) else min(width, one.numel())
        several = [place for place in range(one.dim() - 1) if one.shape[place] > 1]
        runs = ((label, size),) * max(one.numel() // max(size, 1), 1)
        counted = axis(several[0]) if len(several) == 1 and len(runs) == one.shape[several[0]] else None
        return Laid(runs, counted, axis(one.dim() - 1) if one.dim() else None, batch_axis)
    if len(vary) == 1 and still:
        along = one
        for place in reversed(range(one.dim())):
            if place != vary[0]:
                along = along.select(place, 0)
        width = 1
        for place in still:
            width *= one.shape[place]
        side = _runs(tape, along)
        known = {tape.sources[label].width for label, _ in side if label in tape.sources} - {0, 1}
        if known and width not in known and all(size in known for label, size in side if label > DENSE and label != MIXED):
            # Rows of several features side by side.
            return Laid(side * width, axis(still[0]) if len(still) == 1 and len(side) == 1 else None, axis(vary[0]), batch_axis)
        runs = tuple((int(label), width) for label in along)
        return Laid(runs, axis(vary[0]), axis(still[0]) if len(still) == 1 else None, batch_axis)
    runs = _pieces(tape, number, one.numel()) or _runs(tape, one.reshape(-1))
    return Laid(runs, None, axis(vary[0]) if len(vary) == 1 else None, batch_axis)


def _pieces(tape: Tape, number: int, size: int) -> tuple[tuple[int, int], ...]:
    """The vectors of a value that was put together from parts, part by part; none if they do not make up ``size`` columns."""
    op = tape.makers.get(tape.back(number, lambda o: o.family in ("move", "unary", "norm", "nonlinear")))
    if op is None or op.name not in ("cat", "stack") or len(op.ins) < 2:
        return ()
    parts = tuple(run for part in op.ins for run in laid(tape, part).runs) if all(map(tape.present, op.ins)) else ()
    return parts if sum(width for _, width in parts) == size else ()


def _runs(tape: Tape, flat: torch.Tensor) -> tuple[tuple[int, int], ...]:
    values, counts = torch.unique_consecutive(flat, return_counts=True)
    found: list[tuple[int, int]] = []
    for label, count in zip(values.tolist(), counts.tolist(), strict=True):
        width = tape.sources[label].width if label in tape.sources else 0
        if width and count > width and count % width == 0:
            found += [(label, width)] * (count // width)
        else:
            found.append((label, count))
    return tuple(found)


def root_of(tape: Tape, number: int, used: frozenset[int], *, apart: bool = False) -> int:
    """The value in which the vectors of an operand first lie together: behind views, picks and projections of each by itself.

    Where features are looked up ``apart``, that of one feature alone is searched for behind layers too.
    """
    while True:
        op = tape.makers.get(number)
        if op is None or op.mixes or op.family not in ("move", "unary", "norm", "linear", "nonlinear", "reduce"):
            return number
        taken = set(tape.labelled(op))
        if len(taken) != 1:
            return number
        (before,) = taken
        if tape.mixed(before) or not tape.own(before) <= used:
            return number
        single = len(tape.own(before)) < 2 and not (apart and tape.lookups(before))
        if op.family != "move" and (single or op.family == "reduce"):
            return number
        number = before


def block_of(tape: Tape, ops: Iterable[Op], *, apart: bool = False) -> Block:
    """The vectors that a group of operators takes; ``apart`` looks each feature up where it stands alone."""
    operands = [(op, number) for op in ops for number in dict.fromkeys(op.ins) if tape.own(number)]
    used = frozenset(label for _, number in operands for label in tape.own(number))
    nodes = {number: node for node, number in reversed(tape.held.items())}
    roots: dict[int, Op] = {}
    for op, number in operands:
        roots.setdefault(root_of(tape, number, used, apart=apart), op)
    # One value that holds all of them is the block; the others are parts of it.
    if apart:
        roots = _cover(tape, roots)
    whole = [] if apart else [number for number in roots if tape.own(number) == used and (len(used) > 1 or len(roots) == 1)]
    if whole:
        held = [number for number in whole if number in nodes]
        roots = {min(held or whole, key=lambda n: (tape.values[n].numel, n)): roots[(held or whole)[0]]}
    inputs: dict[str, BlockInput] = {}
    members: list[Member] = []
    seen: set[Member] = set()
    for number, op in roots.items():
        mine = _members(tape, laid(tape, number).runs)
        fresh = [member for member in mine if len(roots) == 1 or member.role == "dense" or member not in seen]
        seen.update(mine)
        members += fresh
        places = [number] if number in nodes else _outside(tape, op)
        for place in places:
            made = _input(tape, place, nodes[place].name)
            inputs.setdefault(made.node, made)
    return Block(tuple(members), tuple(inputs.values()))


def _cover(tape: Tape, roots: dict[int, Op]) -> dict[int, Op]:
    """Values that hold all features between them, each with as few others as there are."""
    chosen: dict[int, Op] = {}
    covered: set[int] = set()
    pure = [number for number in roots if not tape.mixed(number)]
    for number in sorted(pure, key=lambda n: (len(tape.own(n)), tape.values[n].numel, n)):
        if tape.own(number) - covered:
            chosen[number] = roots[number]
            covered |= tape.own(number)
    return dict(sorted(chosen.items()))


def _outside(tape: Tape, op: Op) -> list[int]:
    """What a node takes, where the operator is deep inside of what the node calls."""
    return [tape.held[node] for node in op.node.all_input_nodes if node in tape.held and tape.own(tape.held[node])]


def _input(tape: Tape, number: int, node: str) -> BlockInput:
    places = laid(tape, number)
    shape = tuple(-1 if axis == places.batch_axis else size for axis, size in enumerate(tape.values[number].shape))
    return BlockInput(node, shape, places.vector_axis, places.width_axis, _members(tape, places.runs))


def _members(tape: Tape, runs: Sequence[tuple[int, int]]) -> tuple[Member, ...]:
    found = []
    for label, width in runs:
        if label == 0:
            found.append(Member("", "constant", width))
        elif label == MIXED:
            found.append(Member("", "mixed", width))
        else:
            source = tape.sources[label]
            found.append(Member(source.name, source.role, width))
    return tuple(found)
