"""Pooled rows on their way back: the peer permute, the pieces of an exchange, the local shuffle, columns in declared order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..exchange import Exchange, split_traffic
from ..lookups import Lookup, LookupOutput, LookupSet
from .base import Progress, RankContext, RankLocal
from .select import JaggedIds


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
    """The received buffer as one (rows, columns) block per member of the group."""

    def forward(self, buffer: torch.Tensor, batch_sizes: Sequence[int]) -> list[torch.Tensor]:
        blocks = self.exchange.received(self.context.rank)
        parts = buffer.split(self.exchange.sizes(blocks, batch_sizes))
        return [
            part.view(sum(batch_sizes[row] for row in block.rows), self.exchange.width(block.owners))
            for part, block in zip(parts, blocks, strict=True)
        ]


class OpenRound(RankLocal):
    """Stands where a rank has sent all of one round of exchanges, and the next collective is the first one of another.

    Until then a rank that fails can tell the others, whether or not what it has been sent has arrived.
    """

    def __init__(self, context: RankContext | None = None) -> None:
        super().__init__()
        self._context = context

    def bind(self, context: RankContext) -> nn.Module:
        return OpenRound(context)

    def forward(self) -> None:
        if self._context is None:
            raise TypeError("OpenRound runs only on a rank: call program.distribute() or program.simulate()")
        self._context.progress = Progress.READING


class RestoreColumns(nn.Module):
    """Received columns laid out in the flat model's order: one (B, width) tensor per output of the flat model.

    ``arrival`` are the lookups in the order in which their columns arrive, block by block. Columns are only copied, once;
    neighbours that stay neighbours are copied together. ``first`` says for each block at which column the first lookup's begin,
    ``outputs`` which outputs are made; the others are None.
    """

    def __init__(
        self,
        lookups: LookupSet,
        arrival: Sequence[Sequence[str]],
        first: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.lookups = lookups
        self.arrival = tuple(tuple(block) for block in arrival)
        self.first = tuple(first) if first is not None else (0,) * len(self.arrival)
        self.outputs = tuple(outputs) if outputs is not None else tuple(range(len(lookups.outputs)))
        made = set(self.outputs)
        place: dict[str, tuple[int, int]] = {}
        for number, block in enumerate(self.arrival):
            start = self.first[number]
            for name in block:
                place[name] = (number, start)
                start += lookups.lookup[name].dim
        self._outputs = [
            _runs([lookups.lookup[name] for name in output.lookups], place) if number in made else []
            for number, output in enumerate(lookups.outputs)
        ]

    def forward(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [
            torch.cat([blocks[number].narrow(1, start, width).to(dtype) for number, start, width, dtype in runs], dim=1)
            if runs
            else None
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

    Where the output's shape follows that of another value, that value is given too; and the lookup's ids, where other lookups of
    its round may have more of them than it has.
    """

    def __init__(self, output: LookupOutput, lookups: LookupSet) -> None:
        super().__init__()
        self.output = output
        self._dims = [lookups.lookup[name].dim for name in output.lookups]

    def forward(self, columns: torch.Tensor, like: torch.Tensor | None = None, ids: JaggedIds | None = None) -> object:
        if ids is not None:
            columns = columns[: ids.lengths.shape[1]]
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
