"""Pooled embeddings: local lookups, the peer permute, the pieces of an exchange, the local shuffle, columns in declared order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..exchange import Exchange, split_traffic
from ..graphs import resolve_parameter
from ..lookups import Lookup, LookupOutput, LookupSet, Pooling, Table
from .base import Progress, RankContext, RankLocal
from .gradients import guard, scale_gradient, tie
from .ids import Bag, GlobalBags


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
            made = _rows(reads, found) if reads[0].lookup.gathers else [_pool(reads[0], found[0])]
            columns.update(zip(group, made, strict=True))
        return [columns[index] for index in range(len(self.reads))]


def _read_together(reads: Sequence[Read]) -> list[list[int]]:
    """Which reads one call serves: rows of one parameter, whose gradient would else be as large as it is for each of them."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, read in enumerate(reads):
        x = read.lookup
        padding = None if x.padding_idx is None else x.padding_idx + read.shift
        how = (x.dtype, padding, x.max_norm, x.norm_type, x.sparse, x.grad)
        key = (id(read.module), read.attribute, *how) if x.gathers else (index,)
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
        return rows.view(units, lookup.dim)
    rows = rows.view(units, lookup.sequence, lookup.dim)
    if lookup.weighted and bag.weights is not None:
        rows = rows * bag.weights.to(rows.dtype).view(units, lookup.sequence, 1)
    return pool_sequence(rows, lookup.pooling)


def pool_sequence(rows: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """(B, n, d) -> (B, d), by the operation that the model was written with."""
    if pooling == "sum":
        return rows.sum(1)
    if pooling == "mean":
        return rows.mean(1)
    return rows.amax(1) if pooling == "amax" else rows.max(1).values


def _pool(read: Read, bag: Bag) -> torch.Tensor:
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
        per_sample_weights=bag.weights if lookup.weighted else None,
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


class PeerPermute(nn.Module):
    """Step c: rows, in rank order, put into ``order`` (a permutation of the ranks)."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = tuple(order)

    def forward(self, x: torch.Tensor, batch_sizes: Sequence[int]) -> torch.Tensor:
        if self.order == tuple(range(len(self.order))):
            return x
        parts = x.split(list(batch_sizes))
        return torch.cat([parts[rank] for rank in self.order])


class Shuffle(nn.Module):
    """Step e: (features, peers) -> (peers, features); blocks of one set of rows are laid side by side."""

    def forward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)


class ExchangeRows(RankLocal):
    """A declared exchange of pooled rows: 2-D rows in, one 2-D block per member of the group out."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def bind(self, context: RankContext) -> nn.Module:
        return BoundExchange(self.exchange, context)

    def parts(self) -> dict[str, nn.Module]:
        """The modules that the exchange is lowered to, by role."""
        return {
            "pack": Pack(),
            "in_splits": Splits(self.exchange, "in"),
            "out_splits": Splits(self.exchange, "out"),
            "unpack": Unpack(self.exchange),
        }


class BoundExchange(nn.Module):
    """A declared exchange on one rank; the transport between packing and unpacking is the caller's."""

    def __init__(self, exchange: Exchange, context: RankContext) -> None:
        super().__init__()
        self.exchange = exchange
        self.pack = Pack()
        self.in_splits = Splits(exchange, "in").bind(context)
        self.out_splits = Splits(exchange, "out").bind(context)
        self.unpack = Unpack(exchange).bind(context)


class Pack(nn.Module):
    """Rows as one contiguous buffer; runs of rows are already in the order of their destinations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1)


class _ExchangeStep(RankLocal):
    def __init__(self, exchange: Exchange, context: RankContext | None = None) -> None:
        super().__init__()
        self.exchange = exchange
        self._context = context

    def bind(self, context: RankContext) -> nn.Module:
        return type(self)(self.exchange, context)

    @property
    def context(self) -> RankContext:
        if self._context is None:
            raise TypeError(f"{type(self).__name__} runs only on a rank: call program.distribute() or program.simulate()")
        return self._context


class Splits(_ExchangeStep):
    """How many values go to ("in") or come from ("out") each member, from every rank's batch size."""

    def __init__(self, exchange: Exchange, direction: str, context: RankContext | None = None) -> None:
        super().__init__(exchange, context)
        self.direction = direction

    def bind(self, context: RankContext) -> nn.Module:
        return Splits(self.exchange, self.direction, context)

    def forward(self, batch_sizes: Sequence[int]) -> list[int]:
        context, exchange = self.context, self.exchange
        blocks = exchange.sent(context.rank) if self.direction == "in" else exchange.received(context.rank)
        sizes = exchange.sizes(blocks, batch_sizes)
        # What is received forward is sent back in the backward pass.
        if self.direction == "in" or torch.is_grad_enabled():
            members = exchange.members(context.rank)
            context.traffic.add(*split_traffic(context.rank, context.topology, members, sizes, exchange.itemsize))
        return sizes


class Unpack(_ExchangeStep):
    """The received buffer as one (rows, columns) block per member of the group.

    ``reopens`` tells that the collective that follows is the first one of a further round of exchanges, so that until then a rank
    that fails can tell the others.
    """

    def __init__(self, exchange: Exchange, context: RankContext | None = None, reopens: bool = False) -> None:
        super().__init__(exchange, context)
        self.reopens = reopens

    def bind(self, context: RankContext) -> nn.Module:
        return Unpack(self.exchange, context, self.reopens)

    def forward(self, buffer: torch.Tensor, batch_sizes: Sequence[int]) -> list[torch.Tensor]:
        if self.reopens:
            self.context.progress = Progress.READING
        blocks = self.exchange.received(self.context.rank)
        parts = buffer.split(self.exchange.sizes(blocks, batch_sizes))
        return [
            part.view(sum(batch_sizes[row] for row in block.rows), self.exchange.width(block.owners))
            for part, block in zip(parts, blocks, strict=True)
        ]


class RestoreColumns(nn.Module):
    """Received columns laid out in the flat model's order: one (B, width) tensor per output of the flat model.

    ``arrival`` are the lookups in the order in which their columns arrive, block by block. Columns are only copied, once;
    neighbours that stay neighbours are copied together.
    """

    def __init__(self, lookups: LookupSet, arrival: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.lookups = lookups
        self.arrival = tuple(tuple(block) for block in arrival)
        place: dict[str, tuple[int, int]] = {}
        for number, block in enumerate(self.arrival):
            start = 0
            for name in block:
                place[name] = (number, start)
                start += lookups.lookup[name].dim
        self._outputs = [_runs([lookups.lookup[name] for name in output.lookups], place) for output in lookups.outputs]

    def forward(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            torch.cat([blocks[number].narrow(1, start, width).to(dtype) for number, start, width, dtype in runs], dim=1)
            for runs in self._outputs
        ]


def _runs(lookups: Sequence[Lookup], place: dict[str, tuple[int, int]]) -> list[tuple[int, int, int, torch.dtype]]:
    """(block, first column, columns, dtype) of each run of lookups that arrive side by side."""
    runs: list[tuple[int, int, int, torch.dtype]] = []
    for lookup in lookups:
        number, start = place[lookup.name]
        if runs and runs[-1][0] == number and runs[-1][1] + runs[-1][2] == start and runs[-1][3] == lookup.dtype:
            runs[-1] = (number, runs[-1][1], runs[-1][2] + lookup.dim, lookup.dtype)
        else:
            runs.append((number, start, lookup.dim, lookup.dtype))
    return runs


class JoinColumns(nn.Module):
    """Columns of all towers on one device, laid out in the flat model's order: one (B, width) tensor per output."""

    def __init__(self, lookups: LookupSet, arrival: Sequence[str]) -> None:
        super().__init__()
        self.arrival = tuple(arrival)
        place = {name: index for index, name in enumerate(self.arrival)}
        self._outputs = [[place[name] for name in output.lookups] for output in lookups.outputs]

    def forward(self, *towers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        columns = [column for tower in towers for column in tower]
        return [torch.cat([columns[place] for place in places], dim=1) for places in self._outputs]


class MakeOutput(nn.Module):
    """The value that the flat model's lookup returns, made from its columns (B, width).

    Where the output's shape follows that of another value, that value is given too.
    """

    def __init__(self, output: LookupOutput, lookups: LookupSet) -> None:
        super().__init__()
        self.output = output
        self._dims = [lookups.lookup[name].dim for name in output.lookups]

    def forward(self, columns: torch.Tensor, like: torch.Tensor | None = None) -> object:
        if like is not None:
            return columns.reshape(*like.shape, self._dims[0])
        shape = self.output.shape
        if shape is not None and len(self._dims) > 1:
            # The features are the last dimension of the ids, and each has its ids side by side.
            width = shape[-1]
            columns = columns.view(len(columns), len(self._dims), self._dims[0] // width, width).transpose(1, 2)
            # As what it stands for: sums over it would else run in another order.
            columns = columns.contiguous()
        if shape is not None:
            return columns.reshape(shape)
        return torchrec_adapter.make_output(self.output.keys, self._dims, columns)
