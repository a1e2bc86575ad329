"""The steps of an id exchange whose sizes depend on data, as operators that a compiler does not look into.

Each takes the number of the :class:`Step` that it belongs to. None of them has a gradient: what has one (rows, weights) is moved by
torch's own operators.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import DistributedError, InputError
from ..exchange import IdExchange
from ..lookups import IdSource
from ..runtime.announce import FAILED, NUMBERS, count_announcement
from ..runtime.base import Progress, RankContext
from ..runtime.ids import CountIds, regroup
from ..runtime.select import JaggedIds, ReadIds, SelectIds

TOLD = NUMBERS + 1
"""How many numbers a rank tells another one: those of the announcement, and a digest of what it has compiled."""


@dataclass
class Step:
    """One round of exchanges of one of a process's graphs."""

    select: SelectIds
    exchange: IdExchange
    context: RankContext
    digest: int
    number: int
    count: CountIds
    error: Exception | None = None

    @classmethod
    def make(cls, select: SelectIds, exchange: IdExchange, context: RankContext, description: object) -> Step:
        """A step with a number by which operators find it, for as long as somebody holds it."""
        digest = int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:7], "big")
        made = cls(select, exchange, context, digest, next(_NUMBERS), CountIds(exchange, context))
        _STEPS[made.number] = made
        return made

    @property
    def sources(self) -> tuple[IdSource, ...]:
        return self.select.sources


_NUMBERS = itertools.count()
# Compiled graphs hold the numbers, and what runs them the steps: a model that nobody holds any more takes its steps with it.
_STEPS: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()


def step_of(number: int) -> Step:
    return _STEPS[number]


@torch.library.custom_op("dmt_compile::request", mutates_args=())
def request(tensors: list[torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read ids, check them, and put them in the order of their destinations.

    Returns the ids, the lengths of their bags, the places of their weights among all weights, and what is told to every rank. A
    rank that cannot use its batch tells so instead; :func:`sizes` then raises on all ranks.
    """
    own = step_of(step)
    device = tensors[0].device
    own.error = None
    try:
        ids, place, start = [], iter(tensors), 0
        for source in own.sources:
            first, *extra = [next(place) for _ in source.nodes]
            if source.weighted:
                weights = torch.arange(start, start + extra[-1].numel(), device=device)
                start, extra[-1] = start + len(weights), weights
            ids.append(ReadIds(source)(first, *extra))
        made = own.select(*[JaggedIds(*one) for one in ids])
        own.select.check_range(made)
    except InputError as error:
        own.error = error
        lengths = torch.zeros(0, dtype=torch.int32, device=device)
        none = torch.zeros(0, dtype=torch.long, device=device)
        told = torch.full((own.exchange.world_size, TOLD), FAILED, dtype=torch.long, device=device)
        return none.to(own.exchange.id_dtype), lengths, none, told.flatten()
    counts = own.count(made).view(-1, NUMBERS)
    told = torch.cat([counts, torch.full_like(counts[:, :1], own.digest)], dim=1)
    values = made.values.to(own.exchange.id_dtype, copy=True)
    order = made.weights.clone() if made.weights is not None else torch.zeros(0, dtype=torch.long, device=device)
    return values, made.lengths.to(torch.int32).flatten(), order, told.flatten()


@request.register_fake
def _(tensors: list[torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own, context = step_of(step), torch.library.get_ctx()
    like = tensors[0]
    values = like.new_empty(context.new_dynamic_size(), dtype=own.exchange.id_dtype)
    lengths = like.new_empty(context.new_dynamic_size(), dtype=torch.int32)
    weighted = own.exchange.carries_weights
    order = like.new_empty(context.new_dynamic_size() if weighted else 0, dtype=torch.long)
    return values, lengths, order, like.new_empty(own.exchange.world_size * TOLD, dtype=torch.long)


@torch.library.custom_op("dmt_compile::sizes", mutates_args=())
def sizes(received: torch.Tensor, sent: torch.Tensor, step: int) -> torch.Tensor:
    """Batch sizes of all ranks, then how many ids, and weights, come from each and go to each: (5, ranks) on the host.

    Raises:
        InputError: this rank could not use its batch.
        DistributedError: another rank could not, or has compiled another program.
    """
    own = step_of(step)
    got, mine = torch.stack([received, sent]).view(2, -1, TOLD).cpu()
    if own.error is not None:
        error, own.error = own.error, None
        own.context.progress = Progress.CALLED_OFF
        raise error
    failed = (got[:, 0] == FAILED).nonzero().flatten().tolist()
    if failed:
        own.context.progress = Progress.CALLED_OFF
        raise DistributedError(
            f"rank {failed[0]} could not use its batch, so no rank runs this step; the error that rank {failed[0]} raised says why"
        )
    other = (got[:, NUMBERS] != own.digest).nonzero().flatten().tolist()
    if other:
        own.context.progress = Progress.CALLED_OFF
        raise DistributedError(
            f"rank {own.context.rank} and rank {other[0]} have compiled different programs: the lookups of this graph, or the "
            "ranks that own their tables, are not the same; build the same model on every rank, with the same options"
        )
    count_announcement(own.context)
    return torch.stack([got[:, 0], got[:, 1], mine[:, 1], got[:, 2], mine[:, 2]])


@sizes.register_fake
def _(received: torch.Tensor, sent: torch.Tensor, step: int) -> torch.Tensor:
    return torch.empty(5, step_of(step).exchange.world_size, dtype=torch.long, device="cpu")


@torch.library.custom_op("dmt_compile::bags", mutates_args=())
def bags(lengths: torch.Tensor, values: torch.Tensor, batch_sizes: Sequence[int], step: int) -> list[torch.Tensor]:
    """Received ids, grouped by sender, as the bags of each feature of this rank: its ids, their offsets, and of each id the bag.

    Last comes the order in which received weights are to be put.
    """
    own = step_of(step)
    rank, features = own.context.rank, own.exchange.features_per_rank[own.context.rank]
    weighted = own.exchange.weighted_per_rank[rank]
    by_sender = [
        part.view(features, size)
        for part, size in zip(lengths.long().split([features * size for size in batch_sizes]), batch_sizes, strict=True)
    ]
    blocks = torch.stack([part.sum(dim=1) for part in by_sender])
    by_feature = torch.cat(by_sender, dim=1)
    regrouped = regroup(values, blocks).long()
    found: list[torch.Tensor] = []
    for own_lengths, ids in zip(by_feature, regrouped.split(by_feature.sum(dim=1).tolist()), strict=True):
        offsets = torch.nn.functional.pad(own_lengths.cumsum(0), (1, 0))
        found += [ids.clone(), offsets, torch.repeat_interleave(own_lengths, output_size=len(ids))]
    counts = blocks[:, list(weighted)]
    return [*found, regroup(torch.arange(int(counts.sum()), device=values.device), counts).clone()]


@bags.register_fake
def _(lengths: torch.Tensor, values: torch.Tensor, batch_sizes: Sequence[int], step: int) -> list[torch.Tensor]:
    own, context = step_of(step), torch.library.get_ctx()
    rows = sum(batch_sizes)
    found: list[torch.Tensor] = []
    for _ in range(own.exchange.features_per_rank[own.context.rank]):
        ids = context.new_dynamic_size()
        found += [
            values.new_empty(ids, dtype=torch.long),
            values.new_empty(rows + 1, dtype=torch.long),
            values.new_empty(ids, dtype=torch.long),
        ]
    weighted = own.exchange.weighted_per_rank[own.context.rank]
    return [*found, values.new_empty(context.new_dynamic_size() if weighted else 0, dtype=torch.long)]
