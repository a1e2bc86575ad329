"""One table with offsets: which rows of a parameter belong to which field (a column of its ids)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..observe import Observed
from .plain_calls import Call


@dataclass(frozen=True)
class Columns:
    """The ids of one lookup, column by column of their last dimension: the row of the parameter that id 0 of each is found in."""

    starts: tuple[int, ...]
    highest: tuple[int, ...]


def split_rows(calls: Sequence[Call], rows: int, observed: Observed) -> tuple[list[int], list[list[int]]] | str | None:
    """Cut a parameter of ``rows`` rows into the tables of several fields, where its lookups add a constant to every field's ids.

    ``calls`` are all lookups of the parameter. Each must add constants, the same for every sample, to ids that are not negative,
    and do nothing else to them that changes a number. That shows where each field begins, and not where it ends; so ids are
    checked against their field's rows in every batch, and the example's ids must already lie there.

    Returns the first row of each table, and for each call the number of the table that every column of its ids reads (a single
    one if all columns read the same). None if there is but one table; a text if the example's ids do not let them be told apart.
    """
    found = []
    for call in calls:
        columns = _columns(call, observed)
        if columns is None or (call.pooling != "rows" and len(columns.starts) > 1):
            return None
        found.append(columns)
    starts = sorted({start for columns in found for start in columns.starts})
    if len(starts) < 2 or starts[0] < 0 or starts[-1] >= rows:
        return None
    # What lies before the first field (a padding row, say) goes with it.
    first = [0, *starts[1:]]
    places = [[bisect_right(starts, start) - 1 for start in columns.starts] for columns in found]
    for columns, own in zip(found, places, strict=True):
        for place, highest in zip(own, columns.highest, strict=True):
            if highest >= (*first, rows)[place + 1]:
                low, behind = first[place], (*first, rows)[place + 1]
                return (
                    f"example_inputs read row {highest} for a field whose rows are {low} to {behind - 1}, so its fields are not "
                    "told apart and it is on one rank"
                )
    return first, places


def _columns(call: Call, observed: Observed) -> Columns | None:
    """None unless constants are added to the ids, the same ones for every sample."""
    seen = observed.tensors[call.ids.name]
    if seen.values is None or seen.values.is_meta or not seen.values.numel() or seen.varies:
        return None
    shift = _Shift(observed)
    try:
        added = shift.of(call.ids)
    except (_Unknown, RuntimeError, IndexError, TypeError, ValueError):
        return None
    if not shift.adds or not isinstance(added, torch.Tensor) or added.shape != seen.values.shape:
        return None
    columns = seen.shape[-1] if len(seen.shape) > 1 and seen.shape[-1] == seen.fewer[-1] else 1
    added, values = (x.reshape(-1, columns).long() for x in (added, seen.values))
    if not torch.equal(added, added[:1].expand_as(added)) or bool((values < added).any()):
        return None
    starts, highest = added[0].tolist(), values.amax(0).tolist()
    if len(set(starts)) == 1:
        return Columns((starts[0],), (max(highest),))
    return Columns(tuple(starts), tuple(highest))


_CUTS = ("unbind", "chunk", "split", "tensor_split", "split_with_sizes")
_ADDITIONS = ("add", "iadd", "add_")
# What moves numbers about and leaves them as they are, or as whole numbers.
_MOVES = (
    *("long", "int", "to", "type", "_to_copy", "contiguous", "clone", "detach", "alias", "cpu", "cuda", "lift_fresh_copy"),
    *("view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand", "movedim", "swapaxes"),
    *("getitem", "select", "slice", "narrow", "stack", "cat", "concat", *_CUTS),
)


class _Unknown(Exception):
    """What is added to the ids cannot be told."""


class _Shift:
    """What is added to ids on their way: their value where everything that it is added to is zero."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.adds = False

    def of(self, node: fx.Node) -> Any:
        """The ids without what they are added to.

        Raises:
            _Unknown: they are partly constants.
        """
        value = self.observed.values.get(node.name)
        name = _name(node)
        if node.name in self.observed.constants:
            raise _Unknown
        if name in _ADDITIONS and len(node.args) == 2 and not node.kwargs and isinstance(value, torch.Tensor):
            self.adds = self.adds or any(not isinstance(arg, fx.Node) or arg.name in self.observed.constants for arg in node.args)
            left, right = (self._operand(arg) for arg in node.args)
            return left + right
        given = node.all_input_nodes[0] if node.all_input_nodes else node
        # Not what is taken out of a list or dict of inputs.
        parts = _name(given) in _CUTS or isinstance(self.observed.values.get(given.name), torch.Tensor)
        if name in _MOVES and given is not node and parts:
            return _call(node, *fx.node.map_arg((node.args, node.kwargs), self.of))
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            constant = self.observed.constants.get(arg.name)
            return constant if constant is not None else self.of(arg)
        if not isinstance(arg, int):
            raise _Unknown
        return arg


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target if node.op == "call_method" else ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name.rpartition("::")[2])
    return str(getattr(node.target, "__name__", ""))


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
