"""forward's arguments, taken apart into their tensors, and how a graph gets from its placeholders to them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..graphs import INPUT
from ..nested import Template, take_apart
from ..runtime.inputs import TakeInputs

_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def argument_names(signature: inspect.Signature) -> list[str]:
    """The names of forward's arguments, with the stars that are before them."""
    return [_STARS.get(parameter.kind, "") + parameter.name for parameter in signature.parameters.values()]


@dataclass(frozen=True)
class Arguments:
    """How forward is called: its signature, the names of its arguments, and what they are made of."""

    signature: inspect.Signature
    names: tuple[str, ...]
    template: Template

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_leaf: Callable[[Any], bool] | None = None
    ) -> tuple[list[Any], Arguments]:
        """The tensors of a call of ``model``, and the rest.

        Raises:
            TypeError: forward cannot be called so.
        """
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        leaves, template = take_apart(list(bound.arguments.values()), is_leaf)
        return leaves, cls(signature, tuple(bound.arguments), template)

    def bind(self, leaves: Sequence[Any]) -> inspect.BoundArguments:
        """The call with other leaves."""
        return inspect.BoundArguments(self.signature, dict(zip(self.names, self.template.build(leaves), strict=True)))

    def write(self, graph: fx.Graph, shapes: Sequence[tuple[int | None, ...]]) -> tuple[list[fx.Node], TakeInputs]:
        """Start a graph: a placeholder for each argument of forward, then a node for each tensor, which ``dmt.inputs`` gives."""
        placeholders = []
        for name, parameter in zip(argument_names(self.signature), self.signature.parameters.values(), strict=True):
            placeholders.append(graph.placeholder(name, default_value=parameter.default))
        module = TakeInputs(self.names, self.template, shapes)
        taken = graph.create_node("call_module", "dmt.inputs", tuple(placeholders), {}, name="dmt_inputs")
        found = []
        for index, (path, label) in enumerate(zip(self.template.paths, module.labels(), strict=True)):
            node = graph.call_function(operator.getitem, (taken, index))
            name = str(placeholders[path[0].key].target)
            node.meta[INPUT] = ((name, *(step.key for step in path[1:])), label)
            found.append(node)
        return found, module
