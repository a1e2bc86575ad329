"""Sparse ids on their way to the rank that owns the table (step a): reading, routing, regrouping.

Jagged ids are feature-major throughout: ``lengths[f, b]`` ids of feature f for sample b, values of feature 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..adapters import plain_ids
from ..adapters import torchrec as torchrec_adapter
from ..errors import DistributedError, InputError
from ..exchange import IdExchange, split_traffic
from ..jagged import permute_blocks
from ..lookups import IdSource
from .base import Constant, Progress, RankContext, RankLocal
from .gradients import scale_gradient


class JaggedIds(NamedTuple):
    """Ids of F features for B samples: ``keys`` F names, ``values`` (N,), ``lengths`` (F, B), ``weights`` (N,) or None."""

    keys: list[str]
    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None


class Bag(NamedTuple):
    """Bags of one feature: ``values`` (n,), ``offsets`` (samples + 1,), ``weights`` (n,) or None."""

    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


class GlobalBags(NamedTuple):
    """The bags a rank looks up, for the samples of all ranks in rank order, and every rank's batch size.

    ``weights`` is the buffer that the bags' weights are cut from, None in a model without weighted lookups.
    """

    bags: list[Bag]
    batch_sizes: tuple[int, ...]
    weights: torch.Tensor | None
    device: torch.device


class IdRequest(NamedTuple):
    """Ids in the order of their destinations: ``lengths`` (E, B) for E entries; ``weights`` of the weighted entries only."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None


class IdSizes(NamedTuple):
    """Split sizes, per rank, of the id AlltoAlls: ``_in`` what this rank sends, ``_out`` what it receives."""

    batch_sizes: tuple[int, ...]
    lengths_in: list[int]
    lengths_out: list[int]
    values_in: list[int]
    values_out: list[int]
    weights_in: list[int]
    weights_out: list[int]


class ReadIds(nn.Module):
    """Read one id source of the flat model as jagged ids; see the two ``read_ids`` of the adapters for what is refused."""

    def __init__(self, source: IdSource) -> None:
        super().__init__()
        self.source = source

    def forward(self, batch: Any, *extra: torch.Tensor) -> JaggedIds:
        if self.source.form == "keyed":
            return JaggedIds(*torchrec_adapter.read_ids(batch, self.source))
        return JaggedIds(*plain_ids.read_ids(batch, extra, self.source))


class SelectIds(nn.Module):
    """Pick ``entries`` (source number, feature), in that order, out of several id sources.

    ``weighted`` are the positions of the entries whose weights are needed too. With ``limits`` (the first row of each entry's
    table, and the one behind its last) ids are checked to lie inside their table before they travel.

    Raises:
        InputError: a feature is missing from the batch, sources disagree on the batch size, or an id is out of range.
    """

    def __init__(
        self,
        entries: Sequence[tuple[int, str]],
        weighted: Sequence[int],
        limits: Sequence[tuple[int, int]],
        sources: Sequence[IdSource],
    ) -> None:
        super().__init__()
        self.entries = tuple(entries)
        self.weighted = tuple(weighted)
        self.limits = tuple(limits)
        self.sources = tuple(sources)
        self._limits = tuple(Constant(ends) for ends in zip(*self.limits, strict=True)) if self.limits else ()
        self._known: tuple[list[list[str]], Constant, Constant] | None = None

    def positions(self, all_keys: list[list[str]]) -> tuple[Constant, Constant]:
        """Rows of the stacked sources that the entries, and the weighted entries, are found in."""
        if self._known is not None and self._known[0] == all_keys:
            return self._known[1], self._known[2]
        found: dict[tuple[int, str], tuple[int, int]] = {}
        row = weighted_row = 0
        for number, keys in enumerate(all_keys):
            for key in keys:
                # Of two features with one name TorchRec reads the last.
                found[number, key] = (row, weighted_row)
                row += 1
                weighted_row += self.sources[number].weighted
        for number, feature in self.entries:
            if (number, feature) not in found:
                have = ", ".join(repr(key) for key in all_keys[number][:12]) + (", ..." if len(all_keys[number]) > 12 else "")
                raise InputError(
                    f"the batch has no feature '{feature}', which the model looks up from '{self.sources[number].label}'; "
                    f"it has {have}"
                )
        order = Constant([found[entry][0] for entry in self.entries])
        weighted = Constant([found[self.entries[position]][1] for position in self.weighted])
        self._known = ([list(keys) for keys in all_keys], order, weighted)
        return order, weighted

    def forward(self, *ids: JaggedIds) -> IdRequest:
        order, weighted = self.positions([one.keys for one in ids])
        sizes = {one.lengths.shape[1] for one in ids}
        if len(sizes) > 1:
            named = ", ".join(f"'{s.label}' {one.lengths.shape[1]}" for s, one in zip(self.sources, ids, strict=True))
            raise InputError(f"the sparse inputs have different batch sizes: {named}")
        values, lengths = _stack(ids)
        if int(lengths.sum()) != values.numel():
            raise InputError(
                f"the lengths of {', '.join(repr(s.label) for s in self.sources)} add up to {int(lengths.sum())} ids, "
                f"but there are {values.numel()}"
            )
        weights = None
        if weighted.values:
            carrying = [(one.lengths, one.weights) for one in ids if one.weights is not None]
            weight_lengths = torch.cat([own for own, _ in carrying])
            weights = _select(torch.cat([own for _, own in carrying]), weight_lengths, weighted)
        values = _select(values, lengths, order)
        if not _keeps_order(order, lengths):
            lengths = lengths[order.on(lengths.device)]
        return IdRequest(values, lengths, weights)

    def check_range(self, request: IdRequest) -> None:
        """Refuse ids outside their table, naming the first feature that has one."""
        counts = request.lengths.sum(dim=1)
        first, behind = (
            torch.repeat_interleave(ends.on(request.values.device), counts, output_size=request.values.numel())
            for ends in self._limits
        )
        bad = (request.values < first) | (request.values >= behind)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            entry = int((counts.cumsum(0) <= place).sum())
            number, feature = self.entries[entry]
            low, high = self.limits[entry]
            what = f"feature '{feature}' has id {int(request.values[place])}, "
            if low or (self.sources[number].form != "keyed" and len(self.sources[number].features) > 1):
                raise InputError(
                    f"{what}outside rows {low} to {high - 1} of its table, which example_inputs showed to be its own: correct the "
                    "id, or compile with example_inputs that hold such ids"
                )
            raise InputError(f"{what}outside its table of {high} rows")


def _stack(ids: Sequence[JaggedIds]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(ids) == 1:
        return ids[0].values, ids[0].lengths.long()
    return torch.cat([one.values for one in ids]), torch.cat([one.lengths for one in ids]).long()


def _keeps_order(order: Constant, lengths: torch.Tensor) -> bool:
    return order.values == tuple(range(lengths.shape[0]))


def _select(values: torch.Tensor, lengths: torch.Tensor, order: Constant) -> torch.Tensor:
    if _keeps_order(order, lengths):
        return values
    return permute_blocks(values, lengths.sum(dim=1), order.on(lengths.device))


def split_bags(values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, weighted: Sequence[int]) -> list[Bag]:
    """Cut feature-major ids into one :class:`Bag` per row of ``lengths``; ``weighted`` are the rows that have weights."""
    offsets = nn.functional.pad(lengths.cumsum(dim=1), (1, 0))
    sizes = lengths.sum(dim=1).tolist()
    parts = values.split(sizes)
    weight_of: dict[int, torch.Tensor] = {}
    if weights is not None:
        weight_of = dict(zip(weighted, weights.split([sizes[row] for row in weighted]), strict=True))
    return [Bag(part, offsets[row], weight_of.get(row)) for row, part in enumerate(parts)]


class LocalBags(nn.Module):
    """All bags of one round of the local batch, in declaration order, for lookups on one device."""

    def __init__(self, select: SelectIds, round: int = 0) -> None:
        super().__init__()
        self.select = select
        self.round = round

    def forward(self, *ids: JaggedIds) -> list[Bag]:
        request = self.select(*ids)
        return split_bags(request.values, request.lengths, request.weights, self.select.weighted)


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
        if context.check_ids:
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
        counts = torch.zeros(self.exchange.world_size, 3, dtype=torch.long, device=lengths.device)
        counts[:, 0] = lengths.shape[1]
        counts[:, 1] = self._per_rank(ids)
        if self.exchange.carries_weights:
            counts[:, 2] = self._per_rank(ids * self._weighted.on(lengths.device))
        self.context.progress = Progress.EXCHANGING
        return counts.flatten()

    def _per_rank(self, per_feature: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(per_feature.cumsum(0), (1, 0))[self._starts.on(per_feature.device)].diff()


FAILED = -1


class ReadSizes(_IdStep):
    """Split sizes of the id exchange from what every rank announced.

    Raises:
        DistributedError: another rank could not use its batch.
    """

    def forward(self, counts: torch.Tensor, sent: torch.Tensor) -> IdSizes:
        context, exchange = self.context, self.exchange
        received, mine = torch.stack([counts, sent]).view(2, -1, 3).tolist()
        failed = [rank for rank, row in enumerate(received) if row[0] == FAILED]
        if failed:
            context.progress = Progress.CALLED_OFF
            raise DistributedError(
                f"rank {failed[0]} could not use its batch, so no rank runs this step; "
                f"the error that rank {failed[0]} raised says why"
            )
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
        for counts, itemsize in (
            ([3] * len(world), 8),
            (sizes.lengths_in, 4),
            (sizes.values_in, self.exchange.id_dtype.itemsize),
        ):
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
        values = _regroup(values, blocks)
        if weights is not None:
            self._count(weights, sizes)
            weights = _regroup(weights, blocks[:, list(weighted)])
        bags = split_bags(values.long(), by_feature, weights, weighted)
        return GlobalBags(bags, sizes.batch_sizes, weights, values.device)

    def _count(self, weights: torch.Tensor, sizes: IdSizes) -> None:
        # The gradient of received weights is sent back.
        for counts in (sizes.weights_in, sizes.weights_out) if weights.requires_grad else (sizes.weights_in,):
            world = range(self.exchange.world_size)
            sent = split_traffic(self.context.rank, self.context.topology, world, counts, weights.element_size())
            self.context.traffic.add(*sent)


def _regroup(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """(senders, features) -> (features, senders), for blocks of ids of ``blocks`` lengths."""
    senders, features = blocks.shape
    if senders == 1 or features <= 1:
        return values
    order = torch.arange(senders * features, device=blocks.device).view(senders, features).t().flatten()
    return permute_blocks(values, blocks.flatten(), order)
