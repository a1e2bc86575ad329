"""Which nodes of Dynamo's graph write to what others read: the passes move the ids of lookups past them."""

from __future__ import annotations

import torch
from torch import fx

from ..shapes import STORAGE, WRITES
from ..writes import may_write


def note_memory(graph: fx.Graph) -> None:
    """Note on the nodes what memory their values are in, and what they write to, as for a graph that has run on example inputs.

    Dynamo's own values, which stand for tensors, share memory as the user's do, and count how often it is written to.
    """
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(value):
            node.meta[STORAGE] = value.untyped_storage()._cdata
        writes = may_write(node) or isinstance(node.target, torch._ops.HigherOrderOperator)
        written = [
            used.meta[STORAGE]
            for used in node.all_input_nodes
            if STORAGE in used.meta and used.meta["example_value"]._version and writes
        ]
        if written:
            node.meta[WRITES] = frozenset(written)
