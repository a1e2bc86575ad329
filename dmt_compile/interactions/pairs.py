"""Products of two features' vectors: dots, element-wise and outer products, bilinear forms, compressed interaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .flow import Group, contraction, ends, next_linear, projected, weighted_by_softmax
from .labels import MIXED
from .records import Kind
from .tape import Op, Tape

Form = Literal["dots", "pair dot", "pairs", "grid", "outer", "flat outer", "across"]


@dataclass
class Pairs:
    """Products of one form, all with one operand projected by a layer or all without."""

    form: Form
    bilinear: bool
    both_projected: bool
    ops: list[Op] = field(default_factory=list)


def operands(tape: Tape, op: Op) -> tuple[int, int] | None:
    """The two labelled values that are multiplied."""
    taken = list(tape.factors(op))
    if op.name == "_trilinear":
        taken = [number for number in taken if tape.own(number)]
    return (taken[0], taken[1]) if len(taken) == 2 else (taken[0], taken[0]) if len(taken) == 1 else None


def form_of(tape: Tape, op: Op) -> Form | None:
    """How a product combines its operands."""
    found = operands(tape, op)
    if found is None:
        return None
    a, b = found
    if op.name == "_trilinear":
        return "pair dot"
    if op.family == "product":
        return _form_of_matrices(tape, op, a, b)
    return _form_of_elements(tape, op, a, b)


def _varies(tape: Tape, number: int, axis: int) -> bool:
    labels = tape.values[number].labels
    if labels is None:
        return False
    return tape.present(number) == {MIXED} or bool((labels != labels.select(axis, 0).unsqueeze(axis)).any())


def _form_of_matrices(tape: Tape, op: Op, a: int, b: int) -> Form | None:
    first, second = tape.values[a].shape, tape.values[b].shape
    if len(first) < 2 or len(second) < 2:
        return "pair dot"
    rows, columns = len(first) - 2, len(second) - 1
    if contraction(tape, op) == 1:
        if _varies(tape, a, rows) and _varies(tape, b, columns):
            own = [size for _, size in _run_lengths(tape, a, rows)]
            return "flat outer" if own and min(own) > 1 else "grid"
        return "outer"
    if _varies(tape, a, len(first) - 1) and not _varies(tape, a, rows):
        return "across"
    several = _varies(tape, a, rows) or _varies(tape, b, columns) or len(first) == 2
    return "dots" if several else "pair dot"


def _run_lengths(tape: Tape, number: int, axis: int) -> list[tuple[int, int]]:
    import torch

    labels = tape.values[number].labels
    assert labels is not None
    along = labels.movedim(axis, -1).reshape(-1, labels.shape[axis])[0]
    values, counts = torch.unique_consecutive(along, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return [(label, count) for label, count in pairs if label > 1 and label != MIXED and tape.sources[label].width > 1]


def _form_of_elements(tape: Tape, op: Op, a: int, b: int) -> Form:
    out = tape.values[op.outs[0]].shape
    alone: dict[int, list[bool]] = {a: [], b: []}
    for mine, other in ((a, b), (b, a)):
        shape, theirs = tape.values[mine].shape, tape.values[other].shape
        for axis in range(len(out)):
            at, there = axis - len(out) + len(shape), axis - len(out) + len(theirs)
            size, their_size = (shape[at] if at >= 0 else 1), (theirs[there] if there >= 0 else 1)
            if size > 1 and their_size == 1:
                alone[mine].append(_varies(tape, mine, at))
            elif size > 1 and _varies(tape, mine, at) and not _varies(tape, other, there):
                # The same grid with its operands repeated.
                alone[mine].append(True)
    if alone[a] and alone[b]:
        return "grid" if any(alone[a]) and any(alone[b]) else "outer"
    return "pairs"


def collect(tape: Tape, ops: list[Op]) -> list[Pairs]:
    """Products of raw vectors, by form."""
    found: dict[tuple[Form, bool], Pairs] = {}
    for op in ops:
        form = form_of(tape, op)
        taken = operands(tape, op)
        if form is None or taken is None:
            continue
        left, right = (projected(tape, number) for number in taken)
        bilinear = left != right or op.name == "_trilinear"
        entry = found.setdefault((form, bilinear), Pairs(form, bilinear, left and right))
        entry.ops.append(op)
    return list(found.values())


def classify(tape: Tape, pairs: Pairs) -> Group:
    """What products of one form make up, seen from what becomes of them."""
    made = sum(tape.per_sample(op.outs[0]) for op in pairs.ops)
    reach, last = ends(tape, pairs.ops)
    left = sum(tape.per_sample(number) for number in last)
    if pairs.form == "outer":
        return Group("bilinear" if pairs.bilinear else "outer product", "", pairs.ops)
    if pairs.form == "across":
        return Group("opaque", "products summed over the vectors", pairs.ops)
    if pairs.form in ("dots", "pair dot"):
        return _dots(pairs, made, left)
    wide = _width(tape, pairs)
    number = made / max(wide, 1)
    if pairs.form == "grid" and _compresses(tape, pairs.ops[0], number):
        return Group("compressed interaction", "", pairs.ops)
    how = f"{_count(number)} pairs" if number != 1 else "1 pair"
    if pairs.bilinear:
        return Group("bilinear", how, pairs.ops)
    if any(_meets_softmax(tape, value, op) for value in reach for op in tape.users.get(value, ())):
        return Group("factorisation machine", f"attention over {how}", pairs.ops)
    if left == 1 and number > 2:
        return Group("factorisation machine", how, pairs.ops)
    if number > 1 and wide > 1 and left == wide:
        return Group("factorisation machine", f"bi-interaction, {how}", pairs.ops)
    kind: Kind = "inner product" if left <= number or wide == 1 else "element-wise product"
    return Group(kind, how, pairs.ops)


def _dots(pairs: Pairs, made: float, left: float) -> Group:
    if pairs.bilinear:
        return Group("bilinear", f"{_count(min(left, made))} products", pairs.ops)
    if pairs.form == "pair dot":
        return Group("inner product", "1 pair" if made == 1 else f"{_count(made)} pairs", pairs.ops)
    if left == 1 and made > 1:
        return Group("factorisation machine", "sum of all products", pairs.ops)
    kept = f"{_count(left)} of {_count(made)} products kept" if left < made else f"all {_count(made)} products"
    return Group("pairwise dot", f"projected vectors, {kept}" if pairs.both_projected else kept, pairs.ops)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _width(tape: Tape, pairs: Pairs) -> int:
    """The columns of one product."""
    op = pairs.ops[0]
    widths = {tape.sources[label].width for number in op.ins for label in tape.lookups(number)}
    shape = tape.values[op.outs[0]].shape
    if pairs.form == "grid" and op.family == "product":
        return max(widths, default=1)
    # A projection may have changed the width.
    if len(shape) > 1 and any(not _varies(tape, number, -1) for number in tape.factors(op)):
        return shape[-1]
    sizes = [size for size in shape[1:] if size in widths]
    return sizes[-1] if sizes else shape[-1] if shape else 1


def _compresses(tape: Tape, op: Op, number: float) -> bool:
    """Whether a layer sums over the pairs and leaves the columns apart."""
    layer = next_linear(tape, op.outs)
    return layer is not None and contraction(tape, layer) == number and number > 1


def is_outer_of_all(tape: Tape, op: Op) -> bool:
    """Whether a product is the outer product of all vectors side by side with themselves."""
    return op.family == "product" and form_of(tape, op) == "flat outer"


def compresses(tape: Tape, op: Op) -> bool:
    """Whether a product is a layer of a compressed interaction."""
    pairs = Pairs("grid", False, False, [op])
    return form_of(tape, op) == "grid" and _compresses(tape, op, tape.per_sample(op.outs[0]) / max(_width(tape, pairs), 1))


def _meets_softmax(tape: Tape, value: int, op: Op) -> bool:
    if op.family not in ("mul", "gate", "product"):
        return False
    return any(number != value and weighted_by_softmax(tape, number) is not None for number in tape.labelled(op))
