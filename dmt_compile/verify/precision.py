"""Which floating types gradients flow through: what has been rounded to a short type is no more exact in a longer one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..nested import take_apart
from ..stage import Stage


@dataclass
class TypesSeen:
    """Watches a run of a stage with gradients: the coarsest type of what has a gradient, by name of the node."""

    of: dict[str, torch.dtype] = field(default_factory=dict)

    def see(self, rank: int, node: fx.Node, value: Any) -> None:
        """What :func:`simulate` is to call."""
        found = [leaf.dtype for leaf in take_apart(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        before = [self.of[node.name]] if node.name in self.of else []
        if found:
            self.of[node.name] = coarsest(*before, *found)

    def by_parameter(self, stage: Stage) -> dict[str, torch.dtype]:
        """For every parameter that the stage's graph reads, the coarsest type on any way from it to the output."""
        names = {id(parameter): name for name, parameter in stage.root.named_parameters()}
        behind: dict[fx.Node, list[torch.dtype]] = {}
        found: dict[str, torch.dtype] = {}
        for node in reversed(stage.graph.nodes):
            read = list(_parameters(stage, node))
            own = [self.of[node.name], *(one.dtype for one in read if one.is_floating_point())] if node.name in self.of else []
            # What nobody reads has written to a tensor that it was given, and is read from there.
            readers = node.users or {user: None for used in node.all_input_nodes for user in used.users if user in behind}
            types = [*own, *(dtype for user in readers for dtype in behind[user])]
            behind[node] = [coarsest(*types)] if types else []
            for parameter in read:
                name = names.get(id(parameter))
                if name is not None and parameter.is_floating_point():
                    found[name] = coarsest(found.get(name, parameter.dtype), *behind[node])
        return found


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The floating type with the largest unit in the last place."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _parameters(stage: Stage, node: fx.Node) -> Iterator[torch.nn.Parameter]:
    if node.op == "call_module":
        yield from stage.module(node).parameters()
    elif node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        value = getattr(stage.graph_module.get_submodule(path), name)
        if isinstance(value, torch.nn.Parameter):
            yield value
