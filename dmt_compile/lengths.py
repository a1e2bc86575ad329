"""Which numbers of ids per sample a model takes: found out by running it on longer and on shorter example inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import fx

from .adapters import torchrec as torchrec_adapter
from .capture.captured import Captured, differs, disagrees
from .errors import CaptureError, DmtError
from .nested import take_apart
from .observe import Inputs, shapes_on
from .verify.deal import Layout, batch_size, deal_sizes, ragged_tensors

_SAMPLES = 4
# All sizes that are alike are changed at once, so that another input may be what does not fit.
_ANYWAY = "dynamic_ids=True lets it change all the same"
_ONE = "the example has one id per sample, which does not show whether the model takes more: give one with more of them"

Shapes = Mapping[str, tuple[int, ...]]
Found = TypeVar("Found")


@dataclass
class Lengths:
    """Tries a captured model on a few samples of its example inputs.

    Nothing says which sizes of the inputs belong together, so all that are alike are changed at once; never the first one of a
    tensor, which is that of the batch. Each size is tried once.
    """

    captured: Captured
    inputs: Inputs
    layout: Layout
    # By size, what was found when it was first asked for: in words if the model takes no other.
    _inputs: dict[int, dict[int, Inputs] | str] = field(default_factory=dict)
    _shapes: dict[int, list[dict[int, Shapes]] | str] = field(default_factory=dict)
    _differs: dict[int, str | None] = field(default_factory=dict)

    def fixed(self, flat: fx.GraphModule, ids: fx.Node, grows: int, shape: tuple[int, ...]) -> str | None:
        """Why the number of ids per sample may be no other one than in the example; None if it may be any.

        ``ids`` are a tensor of ``flat``, one of the captured graphs, of ``shape`` in the example; dimension ``grows`` is the
        batch's.
        """
        sizes = dict.fromkeys(size for place, size in enumerate(shape) if place != grows and size > 1)
        found = "the number is not a size of the inputs" if sizes else _ONE
        for size in sizes:
            shapes = _once(self._shapes, size, self._shapes_by_length)
            if isinstance(shapes, str):
                found = f"{shapes}; {_ANYWAY}"
            elif _follows([one[id(flat)].get(ids.name, ()) for one in shapes], grows):
                difference = _once(self._differs, size, self._difference)
                if difference is None:
                    return None
                found = f"{difference}; {_ANYWAY}"
        return found

    def _inputs_by_length(self, size: int) -> dict[int, Inputs] | str:
        """A shorter, the same and a longer one."""
        try:
            batch = batch_size(*self.inputs, self.layout)
            few = min(batch, _SAMPLES)
            cut = deal_sizes(*self.inputs, [few, batch - few], self.layout)[0]
            return {length: self._changed(cut, size, length) for length in (size - 1, size, size + 1)}
        except DmtError as error:
            return f"the example cannot be cut: {error}"

    def _shapes_by_length(self, size: int) -> list[dict[int, Shapes]] | str:
        """The shapes in every graph, by its identity."""
        by_length = _once(self._inputs, size, self._inputs_by_length)
        if isinstance(by_length, str):
            return by_length
        graphs = {id(flat): flat for flat in self.captured.graphs.values()}
        found = []
        for length, inputs in by_length.items():
            try:
                found.append({key: shapes_on(flat, self.captured.root, inputs) for key, flat in graphs.items()})
            except CaptureError as error:
                return f"with {length}, {str(error).replace(' on example_inputs', '')}"
        return found

    def _difference(self, size: int) -> str | None:
        """How the graph differs from the model."""
        by_length = _once(self._inputs, size, self._inputs_by_length)
        assert not isinstance(by_length, str)
        for length in (size - 1, size + 1):
            difference = differs(self.captured, by_length[length])
            if difference is not None:
                return f"with {length}, {difference}"
        # What squeeze() takes away is there for every other length; a model that needs several ids may refuse one.
        difference = disagrees(self.captured, self._changed(by_length[size], size, 1)) if size > 2 else None
        return f"with 1, {difference.partition(chr(10))[0]}" if difference is not None else None

    def _changed(self, inputs: Inputs, size: int, length: int) -> Inputs:
        ragged = ragged_tensors(*inputs, self.layout)
        # The sizes in a KeyedJaggedTensor are its own: of its lengths, (B, F), the last is the number of its keys.
        leaves, template = take_apart([*inputs], lambda value: isinstance(value, torch.Tensor) or torchrec_adapter.is_jagged(value))
        args, kwargs = template.build([leaf if id(leaf) in ragged else _resized(leaf, size, length) for leaf in leaves])
        return args, kwargs


def _once(known: dict[int, Found], size: int, find: Callable[[int], Found]) -> Found:
    if size not in known:
        known[size] = find(size)
    return known[size]


def _resized(leaf: object, size: int, length: int) -> object:
    """A tensor whose every dimension of ``size``, but the first, is of ``length``: the last entry is repeated or left out."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf
    if leaf.dim() < 2 or leaf.shape[1:].numel() == 1:
        # It may say how many of the ids are no padding; of ids, others are as good.
        counts = length < size and not leaf.is_meta and leaf.dtype in (torch.int32, torch.int64) and leaf.dim()
        return leaf.clamp(max=length) if counts and leaf.numel() and int(leaf.max()) == size else leaf
    for dim in range(1, leaf.dim()):
        if leaf.shape[dim] == size != length:
            kept = leaf.narrow(dim, 0, min(size, length))
            leaf = torch.cat([kept, leaf.narrow(dim, size - 1, 1)], dim) if length > size else kept
    return leaf


def _follows(shapes: Sequence[tuple[int, ...]], grows: int) -> bool:
    """Whether there are fewer ids where the inputs are shorter and more where they are longer, for the same samples."""
    shorter, same, longer = shapes
    if not len(shorter) == len(same) == len(longer) > grows:
        return False
    steps = [[b - a for a, b in zip(x, y, strict=True)] for x, y in ((shorter, same), (same, longer))]
    return steps[0] == steps[1] and steps[0][grows] == 0 and max(steps[0]) > 0 and min(steps[0]) == 0
