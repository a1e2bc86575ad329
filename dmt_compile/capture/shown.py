"""What example inputs show of a value while the model is traced: how many dimensions it has."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from ..graphs import clone_sharing_tensors, deepcopy_values
from .captured import WithoutMaxNorm


class Shown:
    """Runs, on example inputs, the nodes that a value is computed from, on a copy of the model in evaluation mode.

    Only those nodes run, each once, so what they write to (in copies) may have other values than in the model. The number of
    dimensions is that of the model.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._leaves = leaves
        self._copy: nn.Module | None = None
        self._values: dict[fx.Node, Any] = {}
        self._inputs: Sequence[fx.Node] = ()

    def start(self, inputs: Sequence[fx.Node]) -> None:
        """Say which nodes have the example inputs for values."""
        self._inputs = inputs

    def value(self, node: fx.Node, root: nn.Module) -> Any:
        """The value of ``node``, of a graph that is traced on ``root``.

        Raises:
            Exception: whatever the model raises.
        """
        if self._copy is None:
            self._copy = clone_sharing_tensors(self._model, copy_buffers=True).eval()
            self._values.update(zip(self._inputs, deepcopy_values(list(self._leaves)), strict=True))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), WithoutMaxNorm():
            for one in _missing(node, self._values):
                self._values[one] = self._run(one, self._copy, root)
        return self._values[node]

    def _run(self, node: fx.Node, copy: nn.Module, root: nn.Module) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: self._values[used])
        target: Any = node.target
        if node.op == "get_attr":
            try:
                return attrgetter(target)(copy)
            except AttributeError:
                # A constant that tracing has made.
                return attrgetter(target)(root)
        if node.op == "call_module":
            return copy.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


def _missing(node: fx.Node, known: dict[fx.Node, Any]) -> list[fx.Node]:
    """What has to run for ``node``, in order."""
    needed, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if one not in known and one not in needed:
            needed.add(one)
            waiting.extend(one.all_input_nodes)
    return [one for one in node.graph.nodes if one in needed]
