"""Sparse ids on their way to the rank that owns the table (step a): routing and regrouping."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..errors import InputError
from ..exchange import IdExchange, split_traffic
from ..jagged import permute_blocks
from .announce import NUMBERS, count_announcement, refuse_failed
from .base import Constant, Progress, RankContext, RankLocal
from .gradients import scale_gradient
from .select import Bag, IdRequest, JaggedIds, SelectIds, split_bags


class GlobalBags(NamedTuple):
    """The bags a rank looks up, for the samples of all ranks in rank order, and every rank's batch size.

    ``weights`` is the buffer that the bags' weights are cut from, None in a model without weighted lookups.
    """

    bags: list[Bag]
    batch_sizes: tuple[int, ...]
    weights: torch.Tensor | None
    device: torch.device


class IdSizes(NamedTuple):
    """Split sizes, per rank, of the id AlltoAlls: ``_in`` what this rank sends, ``_out`` what it receives."""

    batch_sizes: tuple[int, ...]
    lengths_in: list[int]
    lengths_out: list[int]
    values_in: list[int]
    values_out: list[int]
    weights_in: list[int]
    weights_out: list[int]


class RouteIds(RankLocal):
    """Step a as one declared exchange: jagged ids of the local batch in, :class:`GlobalBags` of my tables out."""

    def __init__(self, select: SelectIds, exchange: IdExchange) -> None:
        super().__init__()
        self.select = select
        self.exchange = exchange

    def bind(self, context: RankContext) -> nn.Module:
        return BoundRoute({role: part.bind(context) for role, part in self.parts().items()}, self.exchange)

    def parts(self) -> dict[str, RankLocal]:
        """The modules that the exchange is lowered to, by role."""
        return {
            "request": MakeRequest(self.exchange, self.select),
            "counts": CountIds(self.exchange),
            "sizes": ReadSizes(self.exchange),
            "unpack": UnpackIds(self.exchange),
        }


class BoundRoute(nn.Module):
    """Step a on one rank; the transport between its parts is the caller's."""

    def __init__(self, parts: dict[str, nn.Module], exchange: IdExchange) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.exchange = exchange


class _IdStep(RankLocal):
    """A part of the lowered id exchange on one rank."""

    def __init__(self, exchange: IdExchange, context: RankContext | None = None) -> None:
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


class MakeRequest(_IdStep):
    """Order the local ids by destination rank, in the type in which they travel.

    Raises:
        InputError: besides what :class:`SelectIds` refuses, ids on another device than the module, or weights of another type
            than the tables.
    """

    def __init__(self, exchange: IdExchange, select: SelectIds, context: RankContext | None = None) -> None:
        super().__init__(exchange, context)
        self.select = select

    def bind(self, context: RankContext) -> nn.Module:
        return MakeRequest(self.exchange, self.select, context)

    def forward(self, *ids: JaggedIds) -> IdRequest:
        context = self.context
        for source, one in zip(self.select.sources, ids, strict=True):
            if context.device is not None and one.values.device != context.device:
                raise InputError(
                    f"'{source.label}' is on {one.values.device}, this rank's module on {context.device}: move the batch there"
                )
            expected = context.weight_dtype
            if one.weights is not None and expected is not None and one.weights.dtype != expected:
                raise InputError(f"'{source.label}' has weights of {one.weights.dtype}, the tables they weigh are {expected}")
        request: IdRequest = self.select(*ids)
        if context.check_ids or self.select.partial:
            self.select.check_range(request)
        weights = request.weights
        if weights is not None and weights.requires_grad:
            # The pooled rows' gradient is divided by the world size at the table; weights are not table parameters.
            weights = scale_gradient(weights, float(self.exchange.world_size), 1.0)
        # An id that the narrower type cannot hold must stay outside its table, for the owner to refuse it.
        values = request.values.clamp(-1, torch.iinfo(self.exchange.id_dtype).max).to(self.exchange.id_dtype)
        return IdRequest(values, request.lengths.to(torch.int32), weights)


class CountIds(_IdStep):
    """One row of three numbers per destination: my batch size, how many ids and how many weights it will get from me."""

    def __init__(self, exchange: IdExchange, context: RankContext | None = None) -> None:
        super().__init__(exchange, context)
        self._starts = Constant(exchange.starts)
        weighted = [0] * exchange.starts[-1]
        for start, run in zip(exchange.starts, exchange.weighted_per_rank, strict=False):
            for place in run:
                weighted[start + place] = 1
        self._weighted = Constant(weighted)

    def forward(self, request: IdRequest) -> torch.Tensor:
        lengths = request.lengths
        ids = lengths.sum(dim=1, dtype=torch.long)
        counts = torch.zeros(self.exchange.world_size, NUMBERS, dtype=torch.long, device=lengths.device)
        counts[:, 0] = lengths.shape[1]
        counts[:, 1] = self._per_rank(ids)
        if self.exchange.carries_weights:
            counts[:, 2] = self._per_rank(ids * self._weighted.on(lengths.device))
        self.context.progress = Progress.EXCHANGING
        return counts.flatten()

    def _per_rank(self, per_feature: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(per_feature.cumsum(0), (1, 0))[self._starts.on(per_feature.device)].diff()


class ReadSizes(_IdStep):
    """Split sizes of the id exchange from what every rank announced.

    Raises:
        DistributedError: another rank could not use its batch.
    """

    def forward(self, counts: torch.Tensor, sent: torch.Tensor) -> IdSizes:
        context, exchange = self.context, self.exchange
        received, mine = torch.stack([counts, sent]).view(2, -1, NUMBERS).tolist()
        refuse_failed(context, [row[0] for row in received])
        batch_sizes = tuple(row[0] for row in received)
        features = exchange.features_per_rank
        sizes = IdSizes(
            batch_sizes=batch_sizes,
            lengths_in=[count * batch_sizes[context.rank] for count in features],
            lengths_out=[features[context.rank] * size for size in batch_sizes],
            values_in=[row[1] for row in mine],
            values_out=[row[1] for row in received],
            weights_in=[row[2] for row in mine],
            weights_out=[row[2] for row in received],
        )
        self._count(sizes)
        return sizes

    def _count(self, sizes: IdSizes) -> None:
        context = self.context
        world = range(self.exchange.world_size)
        count_announcement(context)
        for counts, itemsize in ((sizes.lengths_in, 4), (sizes.values_in, self.exchange.id_dtype.itemsize)):
            context.traffic.add(*split_traffic(context.rank, context.topology, world, counts, itemsize))


class UnpackIds(_IdStep):
    """Received ids, grouped by sender, regrouped by feature: bags over the samples of all ranks."""

    def forward(self, lengths: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None, sizes: IdSizes) -> GlobalBags:
        rank = self.context.rank
        features = self.exchange.features_per_rank[rank]
        weighted = self.exchange.weighted_per_rank[rank]
        lengths = lengths.long()
        by_sender = [
            part.view(features, size) for part, size in zip(lengths.split(sizes.lengths_out), sizes.batch_sizes, strict=True)
        ]
        by_feature = torch.cat(by_sender, dim=1)
        blocks = torch.stack([part.sum(dim=1) for part in by_sender])
        values = regroup(values, blocks)
        if weights is not None:
            self._count(weights, sizes)
            weights = regroup(weights, blocks[:, list(weighted)])
        bags = split_bags(values.long(), by_feature, weights, weighted)
        return GlobalBags(bags, sizes.batch_sizes, weights, values.device)

    def _count(self, weights: torch.Tensor, sizes: IdSizes) -> None:
        # The gradient of received weights is sent back.
        for counts in (sizes.weights_in, sizes.weights_out) if weights.requires_grad else (sizes.weights_in,):
            world = range(self.exchange.world_size)
            sent = split_traffic(self.context.rank, self.context.topology, world, counts, weights.element_size())
            self.context.traffic.add(*sent)


def regroup(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """(senders, features) -> (features, senders), for blocks of ids of ``blocks`` lengths."""
    senders, features = blocks.shape
    if senders == 1 or features <= 1:
        return values
    order = torch.arange(senders * features, device=blocks.device).view(senders, features).t().flatten()
    return permute_blocks(values, blocks.flatten(), order)
