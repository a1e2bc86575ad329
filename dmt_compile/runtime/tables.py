"""Looking rows up in tables, for a tower on one device or for a rank's own tables (step b), and pooling them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..graphs import resolve_parameter
from ..lookups import ANY, Lookup, Pooling, Table
from .base import RankContext, RankLocal
from .gradients import guard, scale_gradient, tie
from .ids import GlobalBags
from .select import Bag


class Read(NamedTuple):
    """One lookup, where its weight is found, the bag it reads, and what is added to its ids: a rank may hold a part of the rows."""

    lookup: Lookup
    module: nn.Module
    attribute: str
    bag: int
    shift: int

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.module, self.attribute)
        return weight if self.lookup.grad else weight.detach()


class _PooledReader:
    """Runs lookups against tables found, by name, in a module tree; holds no parameter of its own."""

    def __init__(
        self,
        root: nn.Module,
        lookups: Sequence[Lookup],
        tables: dict[str, Table],
        bag_of: Sequence[int],
        bases: Mapping[str, int] | None = None,
    ) -> None:
        read = {lookup.table: tables[lookup.table] for lookup in lookups}
        places = {name: resolve_parameter(root, table.parameter) for name, table in read.items()}
        shifts = {name: (bases or {}).get(name, table.start) - table.start for name, table in read.items()}
        self.reads = [
            Read(lookup, *places[lookup.table], bag, shifts[lookup.table]) for lookup, bag in zip(lookups, bag_of, strict=True)
        ]
        self._groups = _read_together(self.reads)

    def __call__(self, bags: Sequence[Bag]) -> list[torch.Tensor]:
        columns: dict[int, torch.Tensor] = {}
        for group in self._groups:
            reads = [self.reads[index] for index in group]
            found = [bags[read.bag] for read in reads]
            made = _rows(reads, found) if reads[0].lookup.gathers else [pool(reads[0], found[0])]
            columns.update(zip(group, made, strict=True))
        return [columns[index] for index in range(len(self.reads))]


def _read_together(reads: Sequence[Read]) -> list[list[int]]:
    """Which reads one call serves: rows of one parameter, whose gradient would else be as large as it is for each of them."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, read in enumerate(reads):
        x = read.lookup
        padding = None if x.padding_idx is None else x.padding_idx + read.shift
        how = (x.dtype, padding, x.max_norm, x.norm_type, x.sparse, x.grad)
        # Reading with a max_norm writes to the table, in the order in which the model reads.
        key = (id(read.module), read.attribute, *how) if x.gathers and x.max_norm is None else (index,)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _rows(reads: Sequence[Read], bags: Sequence[Bag]) -> list[torch.Tensor]:
    lookup = reads[0].lookup
    values = [_shifted(bag.values, read.shift) for read, bag in zip(reads, bags, strict=True)]
    rows = nn.functional.embedding(
        values[0] if len(values) == 1 else torch.cat(values),
        reads[0].weight,
        _padding(reads[0]),
        lookup.max_norm,
        lookup.norm_type,
        sparse=lookup.sparse,
    ).to(lookup.dtype)
    parts = rows.split([len(ids) for ids in values]) if len(values) > 1 else [rows]
    return [_pooled_by_the_model(read.lookup, part, bag) for part, read, bag in zip(parts, reads, bags, strict=True)]


def _pooled_by_the_model(lookup: Lookup, rows: torch.Tensor, bag: Bag) -> torch.Tensor:
    """Rows side by side, or pooled as the model's own operation does it."""
    units = bag.offsets.numel() - 1
    if not lookup.sequence:
        return _one_a_bag(rows, bag, units) if lookup.dim == rows.shape[1] else rows.view(units, lookup.dim)
    weights = _weights(lookup, bag, rows.dtype)
    if lookup.sequence != ANY:
        return _pool_run(lookup, rows, weights, units, lookup.sequence)
    # Samples of one rank have equally many rows.
    lengths, counts = (found.tolist() for found in bag.offsets.diff().unique_consecutive(return_counts=True))
    sizes = [length * count for length, count in zip(lengths, counts, strict=True)]
    parts = weights.split(sizes) if weights is not None else [None] * len(sizes)
    runs = zip(rows.split(sizes), parts, counts, lengths, strict=True)
    pooled = [_pool_run(lookup, *run) for run in runs]
    return torch.cat(pooled) if len(pooled) > 1 else pooled[0] if pooled else rows


def _pool_run(lookup: Lookup, rows: torch.Tensor, weights: torch.Tensor | None, units: int, length: int) -> torch.Tensor:
    rows = rows.view(units, length, lookup.dim)
    if weights is not None:
        rows = rows * weights.view(units, length, 1)
    return pool_sequence(rows, lookup.pooling)


def _one_a_bag(rows: torch.Tensor, bag: Bag, units: int) -> torch.Tensor:
    """(N, d) -> (units, d) for bags of one id or none; an empty bag gets zeros."""
    if len(rows) == units:
        return rows
    places = torch.repeat_interleave(bag.offsets.diff(), output_size=len(rows))
    return rows.new_zeros(units, rows.shape[1]).index_copy(0, places, rows)


def _weights(lookup: Lookup, bag: Bag, dtype: torch.dtype) -> torch.Tensor | None:
    """A bag's weights in the type of the table; they travelled in one that holds those of all tables."""
    if not lookup.weighted or bag.weights is None:
        return None
    weights = bag.weights.to(dtype)
    return weights if lookup.grad else weights.detach()


def pool_sequence(rows: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """(B, n, d) -> (B, d), by the operation that the model was written with."""
    if pooling == "sum":
        return rows.sum(1)
    if pooling == "mean":
        return rows.mean(1)
    return rows.amax(1) if pooling == "amax" else rows.max(1).values


def pool(read: Read, bag: Bag) -> torch.Tensor:
    """The bags of one lookup, pooled: (bags, dim), in the type of the lookup."""
    lookup = read.lookup
    pooled = nn.functional.embedding_bag(
        _shifted(bag.values, read.shift),
        read.weight,
        bag.offsets,
        max_norm=lookup.max_norm,
        norm_type=lookup.norm_type,
        mode=lookup.pooling,
        sparse=lookup.sparse,
        include_last_offset=True,
        per_sample_weights=_weights(lookup, bag, read.weight.dtype),
        padding_idx=_padding(read),
    )
    return pooled.to(lookup.dtype)


def _shifted(ids: torch.Tensor, shift: int) -> torch.Tensor:
    return ids + shift if shift else ids


def _padding(read: Read) -> int | None:
    return None if read.lookup.padding_idx is None else read.lookup.padding_idx + read.shift


class TowerLookups(RankLocal):
    """All lookups of one tower on one device: bags in declaration order in, one (B, d) tensor per lookup out."""

    def __init__(
        self, root: nn.Module, tower: int, lookups: Sequence[Lookup], tables: dict[str, Table], bag_of: Sequence[int]
    ) -> None:
        super().__init__()
        self.tower = tower
        self.lookups = tuple(lookups)
        self._arguments = (tables, tuple(bag_of))
        self.reader = _PooledReader(root, lookups, tables, bag_of)

    def bind(self, context: RankContext) -> nn.Module:
        return TowerLookups(context.root, self.tower, self.lookups, *self._arguments)

    def forward(self, bags: Sequence[Bag]) -> list[torch.Tensor]:
        return self.reader(bags)

    def extra_repr(self) -> str:
        return f"tower={self.tower}, lookups={len(self.lookups)}"


class RankLookups(RankLocal):
    """Step b: a rank's own lookups for the samples of all ranks, (sum of B) x (columns of the rank).

    The gradient of the result is divided by the world size, so that table gradients are those of the mean over ranks of each
    rank's mean loss.
    """

    def __init__(
        self,
        lookups: Sequence[Sequence[Lookup]],
        bag_of: Sequence[Sequence[int]],
        tables: dict[str, Table],
        dtype: torch.dtype,
        context: RankContext | None = None,
    ) -> None:
        super().__init__()
        self.lookups = lookups
        self.bag_of = bag_of
        self.tables = tables
        self.dtype = dtype
        self._context = context
        self._reader: _PooledReader | None = None
        if context is not None:
            self._reader = _PooledReader(context.root, lookups[context.rank], tables, bag_of[context.rank], context.bases)

    def bind(self, context: RankContext) -> nn.Module:
        return RankLookups(self.lookups, self.bag_of, self.tables, self.dtype, context)

    def forward(self, routed: GlobalBags) -> torch.Tensor:
        if self._reader is None or self._context is None:
            raise TypeError("RankLookups runs only on a rank: call program.distribute() or program.simulate()")
        weights = routed.weights
        columns = [column.to(self.dtype) for column in self._reader(routed.bags)]
        if columns:
            pooled = torch.cat(columns, dim=1)
        else:
            pooled = torch.zeros(sum(routed.batch_sizes), 0, dtype=self.dtype, device=routed.device)
        if weights is not None and weights.requires_grad:
            pooled = tie(pooled, weights)
        elif torch.is_grad_enabled() and not pooled.requires_grad:
            # A rank without (trainable) tables must still take part in the backward exchanges, or the others hang.
            pooled = pooled.requires_grad_()
        if self._context.sums_in_backward:
            pooled = guard(pooled, self._context)
        return scale_gradient(pooled, 1.0, float(len(routed.batch_sizes)))
