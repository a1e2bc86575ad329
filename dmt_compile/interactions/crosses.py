"""Cross networks and gates: all vectors, side by side, times what a layer has made of them."""

from __future__ import annotations

from . import pairs
from .flow import Group, is_calm, weighted_by_softmax
from .tape import Op, Tape


def find(tape: Tape, ops: list[Op]) -> list[Group]:
    """Cross networks and gates among products of raw vectors with mixed values."""
    found: dict[tuple[bool, frozenset[int]], list[tuple[Op, int]]] = {}
    for op in ops:
        if pairs.is_outer_of_all(tape, op):
            found.setdefault((False, tape.lookups(tape.factors(op)[0])), []).append((op, tape.factors(op)[0]))
            continue
        kept = [number for number in tape.factors(op) if tape.lookups(number) and not tape.mixed(number)]
        mixed = [number for number in tape.factors(op) if tape.mixed(number)]
        if len(kept) != 1 or len(mixed) != 1:
            continue
        gate = _ends_in_activation(tape, mixed[0])
        if not gate and not _linear_in(tape, mixed[0]):
            continue
        # A layer of a cross network adds to what it takes; a mask that a deep layer has made does not.
        gate = gate or (_bends_in(tape, mixed[0]) and not _adds(tape, op))
        found.setdefault((gate, tape.lookups(kept[0])), []).append((op, mixed[0]))
    groups = []
    for (gate, _), entries in found.items():
        main = [op for op, _ in entries]
        if gate:
            groups.append(Group("gating", "", main))
        else:
            groups.append(Group("cross network", _variant(tape, entries), main))
    return groups


def _ends_in_activation(tape: Tape, number: int) -> bool:
    op = tape.makers.get(tape.back(number, lambda o: o.family in ("move", "unary", "norm")))
    return op is not None and op.family in ("nonlinear", "softmax")


def _linear_in(tape: Tape, number: int) -> bool:
    """Whether a value is made by layers, or by sums of columns times parameters."""
    return any(op.family in ("linear", "reduce") for op in tape.before([number]))


def _bends_in(tape: Tape, number: int) -> bool:
    """Whether there is an activation between the layers that make a value."""
    while True:
        op = tape.makers.get(number)
        taken = set(tape.labelled(op)) if op is not None else set()
        if op is None or len(taken) != 1:
            return False
        if op.family == "nonlinear":
            return True
        (number,) = taken


def _adds(tape: Tape, op: Op) -> bool:
    """Whether what a product makes is added to something of the same vectors, weighted or not."""
    if op.name.startswith("addc"):
        return True
    on = tape.after(op.outs, lambda o: is_calm(o) or o.family in ("mul", "product"))
    return any(user.family == "add" for _, user in on)


def _variant(tape: Tape, entries: list[tuple[Op, int]]) -> str:
    ranks, sizes = [], []
    for op, number in entries:
        ranks.append(_layers_in(tape, number))
        sizes.append((tape.per_sample(number), tape.per_sample(op.outs[0])))
    if all(rank == 0 or small * 2 <= large for rank, (small, large) in zip(ranks, sizes, strict=True)):
        kind = "vector"
    else:
        kind = "full" if max(ranks) <= 1 else "low-rank"
    weighted = _weighted(tape, [op for op, _ in entries])
    if weighted:
        kind = f"{weighted} {kind}"
    depth: dict[int, int] = {}
    for op, _ in entries:
        before = {o.index for o in tape.before(op.ins)}
        depth[op.index] = 1 + max((depth[index] for index in depth if index in before), default=0)
    layers = max(depth.values())
    return f"{kind}, {layers} layers" if layers > 1 else f"{kind}, 1 layer"


def _layers_in(tape: Tape, number: int) -> int:
    """How many linear layers stand one behind the other between the vectors and a value."""
    count = 0
    while True:
        op = tape.makers.get(number)
        taken = set(tape.labelled(op)) if op is not None else set()
        if op is None or len(taken) != 1:
            return count
        if op.family == "linear":
            count += 1
        elif op.family == "reduce":
            return count
        (number,) = taken


def _weighted(tape: Tape, ops: list[Op]) -> str:
    """Whether what the products make is weighted before it goes on: that of several experts, or each column."""
    for op in ops:
        for number, user in tape.after(op.outs, lambda o: o.family in ("move", "unary", "norm")):
            if user.family not in ("mul", "product") or user in ops:
                continue
            others = [n for n in tape.labelled(user) if n != number]
            if any(weighted_by_softmax(tape, n) is not None or _ends_in_activation(tape, n) for n in others):
                summed = user.family == "product" or any(o.family == "reduce" for _, o in tape.after(user.outs, is_calm))
                return "mixture of" if summed else "gated"
    return ""
