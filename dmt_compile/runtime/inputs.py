"""Taking forward's arguments apart into tensors, and putting its result together, for graphs that know only tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..nested import Template, first_difference, take_apart


class TakeInputs(nn.Module):
    """forward's arguments -> the list of their tensors, if they are built as those that the graph was captured from.

    A graph that was captured from example inputs holds for inputs of their structure only: the same keys in the same order, the
    same plain values, and the same sizes except along the batch.
    """

    def __init__(self, names: Sequence[str], template: Template, shapes: Sequence[tuple[int | None, ...]]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.template = template
        self.shapes = tuple(shapes)

    def forward(self, *values: Any) -> list[torch.Tensor]:
        leaves, found = take_apart(list(values))
        for name, mine, theirs in zip(self.names, found.value.parts, self.template.value.parts, strict=True):
            difference = first_difference(mine, theirs, name)
            if difference is not None:
                raise InputError(f"the model was captured from example_inputs that are built in another way: {difference}")
        for tensor, shape, label in zip(leaves, self.shapes, self.labels(), strict=True):
            if tensor.dim() != len(shape) or any(size not in (None, n) for size, n in zip(shape, tensor.shape, strict=True)):
                expected = ", ".join("any" if size is None else str(size) for size in shape)
                hint = ": torch.export has kept all sizes of example_inputs but the batch's, so pad to them, histories too"
                hint = hint if tensor.dim() == len(shape) else ""
                raise InputError(f"'{label}' is of shape {tuple(tensor.shape)}, the model was captured from ({expected}){hint}")
        return leaves

    def labels(self) -> list[str]:
        """How a user writes each of the tensors."""
        return [self.names[path[0].key] + "".join(map(str, path[1:])) for path in self.template.paths]


class MakeResult(nn.Module):
    """Tensors -> forward's result."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self.template = template

    def forward(self, *leaves: Any) -> Any:
        return self.template.build(leaves)


class PickTensors(nn.Module):
    """A nested value -> the list of its tensors."""

    def forward(self, value: Any) -> list[Any]:
        return take_apart(value)[0]
