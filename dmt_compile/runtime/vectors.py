"""What stands around tower modules: vectors taken from what lookups return, and laid out again as the model has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..lookups import LookupOutput, LookupSet
from ..towers.record import TowerVectors


class TakeVectors(nn.Module):
    """The vectors of some lookups out of what the flat model's calls return for them.

    ``outputs`` are the calls whose values are given, in this order. Returns (rows, lookups, width), or (rows, sum of widths) where
    the widths differ.
    """

    def __init__(self, names: Sequence[str], outputs: Sequence[LookupOutput], lookups: LookupSet) -> None:
        super().__init__()
        self.names = tuple(names)
        self.outputs = tuple(outputs)
        self.widths = tuple(lookups.lookup[name].dim for name in names)
        place: dict[str, tuple[int, int, int]] = {}
        for number, output in enumerate(outputs):
            start = 0
            for name in output.lookups:
                width = lookups.lookup[name].dim
                place[name] = (number, start, width)
                start += width
        self._places = [place[name] for name in names]

    def forward(self, *values: object) -> torch.Tensor:
        columns = [columns_of(output, value) for output, value in zip(self.outputs, values, strict=True)]
        parts = [columns[number].narrow(1, start, width) for number, start, width in self._places]
        return vectors_of(parts, self.widths, copied=True)


def columns_of(output: LookupOutput, value: object) -> torch.Tensor:
    """The columns, (B, width), of what the flat model's call returns for one vector per sample and lookup."""
    if not isinstance(value, torch.Tensor):
        return torchrec_adapter.values_of(value)
    if output.shape is not None:
        value = value.movedim(output.shape.index(-1), 0)
    return value.flatten(1)


def vectors_of(parts: Sequence[torch.Tensor], widths: Sequence[int], *, copied: bool) -> torch.Tensor:
    """Columns of several lookups as the vectors that a tower module takes.

    A module may write to what it is given, which others read too: unless ``copied`` is False it gets columns of its own.
    """
    taken = parts[0] if len(parts) == 1 and not copied else torch.cat(list(parts), dim=1)
    return taken.reshape(taken.shape[0], len(widths), widths[0]) if len(set(widths)) == 1 else taken


class FlatColumns(nn.Module):
    """What a tower module has made, (rows, vectors, width) or (rows, columns), as (rows, ``columns``)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, made: torch.Tensor) -> torch.Tensor:
        return made.reshape(made.shape[0], self.columns)


class ReplaceColumns(nn.Module):
    """What the flat model's call returns for its lookups, with other columns in the place of those that towers have taken.

    ``places`` say of each of its lookups which value has its columns (0 the call's own, then the towers'), from which column on,
    and how many.
    """

    def __init__(self, output: LookupOutput, lookups: LookupSet, vectors: Sequence[TowerVectors]) -> None:
        super().__init__()
        self.output = output
        self._dims = [lookups.lookup[name].dim for name in output.lookups]
        taken: dict[str, tuple[int, int]] = {}
        for number, one in enumerate(vectors):
            start = 0
            for name, width in zip(one.lookups, one.widths, strict=True):
                taken[name] = (number, start)
                start += width
        starts = [sum(self._dims[:place]) for place in range(len(self._dims))]
        self.places = [
            (taken[name][0] + 1, taken[name][1], width) if name in taken else (0, start, width)
            for name, start, width in zip(output.lookups, starts, self._dims, strict=True)
        ]

    def forward(self, value: Any, *wide: torch.Tensor) -> object:
        own = columns_of(self.output, value)
        parts = [(own, *wide)[number].narrow(1, start, width) for number, start, width in self.places]
        columns = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if not isinstance(value, torch.Tensor):
            return torchrec_adapter.make_output(self.output.keys, self._dims, columns)
        if self.output.shape is not None:
            grows = self.output.shape.index(-1)
            moved = value.movedim(grows, 0)
            return columns.reshape(moved.shape).movedim(0, grows).contiguous()
        return columns.reshape(value.shape)


class LayVectors(nn.Module):
    """Vectors that towers have made, laid out as the model has its features.

    ``pieces`` say which columns of which given tensor (number, first column, columns) lie one behind the other; ``axes`` are those
    of the result, see :class:`dmt_compile.towers.sites.Site`.
    """

    def __init__(self, pieces: Sequence[tuple[int, int, int]], axes: Sequence[str | int]) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        self.axes = tuple(axes)
        runs: list[tuple[int, int, int]] = []
        for number, start, width in pieces:
            if runs and runs[-1][0] == number and runs[-1][1] + runs[-1][2] == start:
                runs[-1] = (number, runs[-1][1], runs[-1][2] + width)
            else:
                runs.append((number, start, width))
        self._runs = runs
        self._order = [("batch", "vectors", "width", "columns").index(axis) for axis in axes if isinstance(axis, str)]

    def forward(self, *made: torch.Tensor) -> torch.Tensor:
        parts = [made[number].narrow(1, start, width) for number, start, width in self._runs]
        laid = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if "vectors" in self.axes:
            laid = laid.reshape(laid.shape[0], len(self.pieces), self.pieces[0][2]).permute(self._order)
        elif self._order[0] != 0:
            laid = laid.t()
        for place, axis in enumerate(self.axes):
            if not isinstance(axis, str):
                laid = laid.unsqueeze(place)
        # As what it stands for: the model may ask for a view of it.
        return laid.contiguous()
