"""One stage of a compilation: a graph, the same for all ranks, over the model's own modules; and its binding to a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

# Importing this registers the collectives' autograd.
import torch.distributed._functional_collectives  # isort: skip

from .graphs import EXTRAS, copy_graph, extras_of, graph_module_over
from .lookups import LookupSet
from .plan import TowerPlan
from .runtime.base import RankContext, RankLocal
from .towers.record import TowerVectors

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default

PASS = "dmt_pass"
STEP = "dmt_step"


@dataclass(frozen=True)
class Stage:
    """``graph_module`` over ``root``; modules that differ between ranks stand in it unbound, under ``dmt``.

    ``vectors`` are the towers' modules, none in a program that is the flat model.
    """

    name: str
    graph_module: fx.GraphModule
    root: nn.Module
    lookups: LookupSet
    plan: TowerPlan
    vectors: tuple[TowerVectors, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a ``call_module`` node calls."""
        return self.graph_module.get_submodule(str(node.target))

    def bind(self, context: RankContext) -> BoundGraph:
        """The graph as one rank runs it."""
        extras = {
            name: module.bind(context) if isinstance(module, RankLocal) else module
            for name, module in extras_of(self.graph_module).items()
        }
        return BoundGraph(self.graph, context.root, extras)


@dataclass(frozen=True)
class BoundGraph:
    """A stage's graph with the modules of one rank. The graph is shared by all ranks and must not be edited."""

    graph: fx.Graph
    root: nn.Module
    extras: Mapping[str, nn.Module]

    def module(self, target: str) -> nn.Module:
        if target.startswith(f"{EXTRAS}."):
            return self.extras[target[len(EXTRAS) + 1 :]]
        return self.root.get_submodule(target)

    def attribute(self, target: str) -> Any:
        path, _, name = target.rpartition(".")
        return getattr(self.root.get_submodule(path), name)

    def compile(self, groups: Mapping[str, str], name: str) -> fx.GraphModule:
        """A GraphModule of its own whose collectives run in the process groups named by ``groups`` (axis -> group name)."""
        graph = copy_graph(self.graph)
        for node in graph.nodes:
            if node.target is ALL_TO_ALL:
                buffer, out_splits, in_splits, axis = node.args
                node.args = (buffer, out_splits, in_splits, groups[str(axis)])
        return graph_module_over(self.root, graph, self.extras, name)
