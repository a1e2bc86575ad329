"""Towers on one device: Dynamo's graph with its lookups tower by tower, for a process that has no other ranks."""

from __future__ import annotations

import operator

from torch import fx

from ..graphs import EXTRAS
from ..runtime.pooled import JoinColumns, MakeOutput
from ..runtime.tables import TowerLookups
from ..stage import Stage
from .lift import Lifted


def by_towers(module: fx.GraphModule, lifted: Lifted, towers: Stage) -> fx.GraphModule:
    """A graph of Dynamo's arguments that calls the model's own lookups in the order of the stage ``towers``.

    Nothing is exchanged, so a lookup is what it was, bit for bit; what the stage does to move columns about is left out.
    """
    graph = fx.Graph()
    calls = {node.name: node for node in lifted.flat.graph.nodes}
    made: dict[str, fx.Node] = {}
    arguments = (node for node in module.graph.nodes if node.op == "placeholder")
    for (name, _), node in zip(lifted.arguments, arguments, strict=True):
        made[name] = graph.node_copy(node)
    for node in towers.graph.nodes:
        added = towers.module(node) if node.op == "call_module" and str(node.target).startswith(f"{EXTRAS}.") else None
        if isinstance(added, TowerLookups):
            for served in added.lookups:
                call = calls[towers.lookups.outputs[towers.lookups.lookup[served.name].output].node]
                made[call.name] = graph.node_copy(call, lambda used: made[used.name])
        elif isinstance(added, MakeOutput):
            made[node.name] = made[added.output.node]
        elif added is None and node.name not in made and not _is_column(node, towers):
            made[node.name] = graph.node_copy(node, lambda used: made[used.name])
    return fx.GraphModule(module, graph, class_name="Towers")


def _is_column(node: fx.Node, towers: Stage) -> bool:
    """Whether a node takes one lookup's columns from those of all towers."""
    held = node.args[0] if node.target is operator.getitem else None
    return isinstance(held, fx.Node) and held.op == "call_module" and isinstance(towers.module(held), JoinColumns)
