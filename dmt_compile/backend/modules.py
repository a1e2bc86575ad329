"""What stands in a compiled graph in the place of modules that look at values: nothing here branches on data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..lookups import Lookup, LookupOutput
from ..runtime.base import Traffic
from ..runtime.gradients import scale_gradient
from ..runtime.ids import IdSizes
from ..runtime.select import Bag
from ..runtime.tables import pool
from .operators import bags, request, sizes, step_of


class Uncounted(Traffic):
    """Sizes are symbols while a graph is compiled."""

    def add(self, inside: int, across: int) -> None:
        pass


class Requested(NamedTuple):
    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    told: torch.Tensor


class Request(nn.Module):
    """Ids (and weights) of the local batch in the order of their destinations."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, *tensors: torch.Tensor) -> Requested:
        own = step_of(self.step)
        place, given = 0, list(tensors)
        weights = []
        for source in own.sources:
            place += len(source.nodes)
            if source.weighted:
                weights.append(given[place - 1].reshape(-1))
                given[place - 1] = given[place - 1].detach()
        values, lengths, order, told = request(given, self.step)
        if not own.exchange.carries_weights:
            return Requested(values, lengths, None, told)
        carried = torch.cat(weights).index_select(0, order)
        # The pooled rows' gradient is divided by the world size at the table; weights are not table parameters.
        return Requested(values, lengths, scale_gradient(carried, float(own.exchange.world_size), 1.0), told)


class Told(nn.Module):
    """What is told to all ranks."""

    def forward(self, requested: Requested) -> torch.Tensor:
        return requested.told


class Sizes(nn.Module):
    """Split sizes of the exchanges that follow, from what all ranks have told."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, received: torch.Tensor, sent: torch.Tensor) -> IdSizes:
        own = step_of(self.step)
        rows = sizes(received, sent, self.step)
        found = rows.tolist() if own.exchange.carries_weights else rows[:3].tolist()
        for row in found:
            for size in row:
                torch._check(size >= 0)
        batch_sizes, values_out, values_in, *weights = found
        features, rank = own.exchange.features_per_rank, own.context.rank
        return IdSizes(
            batch_sizes=tuple(batch_sizes),
            lengths_in=[count * batch_sizes[rank] for count in features],
            lengths_out=[features[rank] * size for size in batch_sizes],
            values_in=values_in,
            values_out=values_out,
            weights_in=weights[1] if weights else [],
            weights_out=weights[0] if weights else [],
        )


class Routed(NamedTuple):
    bags: list[torch.Tensor]
    batch_sizes: tuple[int, ...]
    weights: torch.Tensor | None


class Bags(nn.Module):
    """Received ids as bags over the samples of all ranks."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, lengths: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None, sizes: IdSizes) -> Routed:
        found = bags(lengths, values, sizes.batch_sizes, self.step)
        if weights is not None and step_of(self.step).exchange.weighted_per_rank[step_of(self.step).context.rank]:
            weights = weights.index_select(0, found[-1])
        return Routed(found[:-1], sizes.batch_sizes, weights)


class Lookups(nn.Module):
    """This rank's own lookups for the samples of all ranks; tables are arguments, as they are in Dynamo's graphs."""

    def __init__(self, step: int, lookups: Sequence[Lookup], bag_of: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.step = step
        self.lookups = tuple(lookups)
        self.bag_of = tuple(bag_of)
        self.dtype = dtype

    def forward(self, routed: Routed, anchor: torch.Tensor | None, *weights: torch.Tensor) -> torch.Tensor:
        own = step_of(self.step)
        rank = own.context.rank
        weighted = own.exchange.weighted_per_rank[rank]
        parts: dict[int, torch.Tensor] = {}
        if weighted and routed.weights is not None:
            runs = routed.weights.split([routed.bags[3 * bag].shape[0] for bag in weighted])
            parts = dict(zip(weighted, runs, strict=True))
        columns = [
            self._columns(lookup, weight, routed.bags[3 * bag : 3 * bag + 3], parts.get(bag)).to(self.dtype)
            for lookup, bag, weight in zip(self.lookups, self.bag_of, weights, strict=True)
        ]
        rows = sum(routed.batch_sizes)
        if columns:
            made = torch.cat(columns, dim=1)
        else:
            like = anchor if anchor is not None else routed.bags[0] if routed.bags else None
            made = torch.zeros(rows, 0, dtype=self.dtype, device=like.device if like is not None else own.context.device)
        if anchor is not None:
            made = take_part(made, anchor)
        if routed.weights is not None and routed.weights.requires_grad:
            # Also where none of this rank's lookups is weighted: gradients of weights are exchanged, too.
            made = take_part(made, routed.weights)
        return scale_gradient(made, 1.0, float(len(routed.batch_sizes)))

    def _columns(
        self, lookup: Lookup, weight: torch.Tensor, bag: Sequence[torch.Tensor], weights: torch.Tensor | None
    ) -> torch.Tensor:
        ids, offsets, places = bag
        held = weight if lookup.grad else weight.detach()
        if lookup.pooling != "rows":
            read: Any = SimpleNamespace(lookup=replace(lookup, sparse=False), weight=held, shift=0)
            return pool(read, Bag(ids, offsets, weights))
        # Gradients are dense: a sparse one has as many rows as there are ids, which no compiled graph knows.
        rows = nn.functional.embedding(ids, held, lookup.padding_idx, lookup.max_norm, lookup.norm_type).to(lookup.dtype)
        # A row for each bag of one id; none for those that only fill up the round.
        return rows.new_zeros(offsets.shape[0] - 1, lookup.dim).index_copy(0, places, rows)


class Output(nn.Module):
    """The value that the model's lookup returns, made from its columns: of as many rows as there are ids, or bags."""

    def __init__(self, output: LookupOutput, dim: int, include_last_offset: bool | None) -> None:
        super().__init__()
        self.output = output
        self.dim = dim
        self.include_last_offset = include_last_offset

    def forward(self, columns: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        if self.output.like is not None:
            return _first(columns, ids.numel()).view(*ids.shape, self.dim)
        if offsets is not None:
            return _first(columns, offsets.shape[0] - bool(self.include_last_offset))
        return _first(columns, ids.shape[0])


def _first(columns: torch.Tensor, rows: int) -> torch.Tensor:
    torch._check(rows <= columns.shape[0])
    return columns.narrow(0, 0, rows)


def take_part(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """``x``, whose gradient is computed wherever ``anchor``'s is, which gets a gradient of zeros.

    A rank without tables must take part in the exchanges of the backward pass, or the others wait for it.
    """
    part: torch.Tensor = _TakePart.apply(x, anchor)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return part


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.like = (anchor.shape, anchor.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype = ctx.like
        # Computed from the gradient, so that no compiler leaves it out; of no value, so that none of them is changed.
        nothing = grads[0].reshape(-1).narrow(0, 0, 0).sum().to(dtype)
        return grads[0], nothing.expand(shape)


__all__ = ["Bags", "Lookups", "Output", "Request", "Sizes", "Told", "Uncounted", "take_part"]
