"""Which nodes of Dynamo's graph write to what others read: the passes move the ids of lookups past them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..shapes import STORAGE, WRITES

_WRITING = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul, operator.setitem),
}


def note_memory(graph: fx.Graph) -> None:
    """Note on the nodes what memory their values are in, and what they write to, as for a graph that has run on example inputs.

    Dynamo's own values, which stand for tensors, share memory as the user's do, and count how often it is written to.
    """
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            node.meta[STORAGE] = value.untyped_storage()._cdata
        written = [
            used.meta[STORAGE]
            for used in node.all_input_nodes
            if STORAGE in used.meta and used.meta["example_value"]._version and _may_write(node)
        ]
        if written:
            node.meta[WRITES] = frozenset(written)


def _may_write(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return (target.endswith("_") and not target.endswith("__")) or getattr(operator, target.strip("_"), None) in _WRITING
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if target in _WRITING or "out" in node.kwargs or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = getattr(target, "__name__", "")
    # An argument "inplace", wherever it stands, makes a function return what it was given.
    same = any(STORAGE in node.meta and used.meta.get(STORAGE) == node.meta[STORAGE] for used in node.all_input_nodes)
    return name.endswith("_") or (same and getattr(target, "__module__", "").startswith("torch.nn"))
