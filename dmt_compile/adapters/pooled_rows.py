"""Rows of a plain lookup that the model itself pools at once: their owner can do that, and send one row per sample."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graphs import NO_GRAD
from ..lookups import Pooling
from ..observe import Observed
from ..shapes import PerSample, Shape, in_order
from .plain_calls import Call

_POOLINGS: dict[Any, Pooling] = {
    **dict.fromkeys(["sum", torch.sum, torch.ops.aten.sum.dim_IntList], "sum"),
    **dict.fromkeys(["mean", torch.mean, torch.ops.aten.mean.dim], "mean"),
    **dict.fromkeys(["max", torch.max, torch.ops.aten.max.dim], "max"),
    **dict.fromkeys(["amax", torch.amax, torch.ops.aten.amax.default], "amax"),
}
_PRODUCTS = (operator.mul, torch.mul, "mul", torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class PooledRows:
    """``node`` is the pooled value, (B, d) or (B, 1, d); ``weights``, if any, is (B, n, 1); ``inner`` are the nodes in between.

    ``weights_lead`` says that they are the first factor, whose order in memory the product takes on.
    """

    node: fx.Node
    pooling: Pooling
    weights: fx.Node | None
    inner: tuple[fx.Node, ...]
    shape: tuple[int, ...]
    weights_lead: bool


def pooled_rows(call: Call, observed: Observed, behind: Collection[fx.Node]) -> PooledRows | None:
    """How the model pools the rows of ids (B, n), if it does nothing else with them; ``behind`` are nodes that need a lookup.

    Recognised are sum, mean and max over the ids, also of rows that are multiplied by a mask or weight of each id before. The
    owner runs the same operations on the same rows, which lie sample by sample in its memory. Where what the model pools lies in
    another way, torch may add in another order: then the model pools itself.
    """
    shape = observed.shapes.get(call.node.name)
    if NO_GRAD in call.node.meta:
        return None
    if call.pooling != "rows" or shape is None or len(shape) != 3 or shape[0] != PerSample(1, 0) or not isinstance(shape[1], int):
        return None
    inner = [call.node]
    weights: fx.Node | None = None
    node = _only_user(call.node)
    if node is not None and node.target in _PRODUCTS and len(node.args) == 2 and not node.kwargs:
        other = node.args[1] if node.args[0] is call.node else node.args[0]
        if not isinstance(other, fx.Node) or other in behind or observed.shapes.get(other.name) != (*shape[:2], 1):
            return None
        kind = observed.dtypes[other.name]
        if kind.is_complex or (kind.is_floating_point and kind != call.dtype):
            return None
        weights = other
        if node.args[0] is other and not _in_order(other, observed):
            return None
        inner.append(node)
        node = _only_user(node)
    if node is None or node.target not in _POOLINGS or not _over_ids(node):
        return None
    pooling = _POOLINGS[node.target]
    if pooling == "max":
        inner.append(node)
        node = _only_user(node)
        if node is None or node.target not in (operator.getitem, getattr) or node.args[1] not in (0, "values"):
            return None
    made = observed.shapes.get(node.name)
    sizes = _sizes(made) if made is not None else None
    if sizes is None:
        return None
    weights_lead = weights is not None and inner[1].args[0] is weights
    return PooledRows(node, pooling, weights, tuple(inner), sizes, weights_lead)


def _in_order(node: fx.Node, observed: Observed) -> bool:
    laid_out = observed.laid_out.get(node.name)
    return laid_out is not None and in_order(*laid_out)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _over_ids(node: fx.Node) -> bool:
    """Whether a reduction runs over dimension 1 of three, and nothing else is asked of it."""
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    dims = given.get("dim", given.get("axis"))
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, list | tuple) and list(dims) in ([1], [-2]) and set(given) <= {"input", "dim", "axis", "keepdim"}


def _sizes(shape: Shape) -> tuple[int, ...] | None:
    """The shape with -1 for the batch."""
    if shape[0] != PerSample(1, 0) or not all(isinstance(size, int) for size in shape[1:]):
        return None
    return (-1, *(size for size in shape[1:] if isinstance(size, int)))
