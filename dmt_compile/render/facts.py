"""What a reader wants to know about an exchange or a tower, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..exchange import Exchange, IdExchange
from ..lookups import Lookup
from ..plan import TowerPlan
from ..topology import Topology
from .words import Span, span_of

EXCHANGE_NAMES = {"world": "global AlltoAll", "tower": "intra-tower AlltoAll", "peer": "peer AlltoAll"}
"""By the axis of the exchange."""


@dataclass(frozen=True)
class RowsFacts:
    """An AlltoAll of pooled rows. B is the number of samples on a rank; spans are over all ranks.

    ``inside`` and ``across`` are the bytes that a rank sends forward to other ranks of its own host, and to other hosts, when
    every rank has one sample.
    """

    axis: str
    groups: int
    group_size: int
    crosses_hosts: bool
    rows_sent: str
    columns_sent: Span
    rows_received: str
    columns_received: Span
    inside: Span
    across: Span


@dataclass(frozen=True)
class IdsFacts:
    """The exchange of sparse ids (step a). How many ids travel depends on the data, so no bytes are given.

    ``features`` counts what a rank sends to all owners together, ``weighted`` those of them that come with weights.
    """

    group_size: int
    crosses_hosts: bool
    rows_sent: str
    rows_received: str
    features: int
    features_received: Span
    weighted: int
    dtype: str
    bytes_per_id: int


@dataclass(frozen=True)
class Share:
    """The lookups of one tower."""

    tower: int
    ranks: tuple[int, ...]
    features: tuple[str, ...]
    columns: int


def share(plan: TowerPlan, tower: int, lookups: Sequence[Lookup]) -> Share:
    """What ``tower`` serves when it runs ``lookups``; features in the plan's order."""
    place = {name: index for index, name in enumerate(plan.towers[tower].features)}
    names = sorted((x.name for x in lookups), key=lambda name: place.get(name, len(place)))
    return Share(tower, plan.towers[tower].ranks, tuple(names), sum(x.dim for x in lookups))


def rows_facts(exchange: Exchange, topology: Topology) -> RowsFacts:
    """The facts of a pooled exchange."""
    grid = exchange.grid
    sent = exchange.columns_sent()
    bytes_sent = exchange.traffic_by_rank(topology)
    members = len(exchange.members(0))
    everyone = _sum_over(grid.world_size, "all {} ranks")
    peers = _sum_over(grid.towers, "my {} peers")
    towers = [exchange.width(grid.tower_ranks(tower)) for tower in range(grid.towers)]
    whole = sum(towers)
    return RowsFacts(
        axis=exchange.axis,
        groups=grid.world_size // members,
        group_size=members,
        crosses_hosts=exchange.crosses_hosts(topology),
        rows_sent=peers if exchange.axis == "peer" else everyone,
        columns_sent=span_of(sent),
        rows_received=peers if exchange.axis == "tower" else "B",
        columns_received=span_of(towers) if exchange.axis == "tower" else (whole, whole),
        inside=span_of(inside for inside, _ in bytes_sent),
        across=span_of(across for _, across in bytes_sent),
    )


def _sum_over(count: int, whom: str) -> str:
    return "B" if count == 1 else f"sum of B over {whom.format(count)}"


def ids_facts(exchange: IdExchange, topology: Topology) -> IdsFacts:
    """The facts of the id exchange."""
    return IdsFacts(
        group_size=exchange.world_size,
        crosses_hosts=topology.hosts > 1,
        rows_sent="B",
        rows_received=_sum_over(exchange.world_size, "all {} ranks"),
        features=sum(exchange.features_per_rank),
        features_received=span_of(exchange.features_per_rank),
        weighted=sum(map(len, exchange.weighted_per_rank)),
        dtype=str(exchange.id_dtype).removeprefix("torch."),
        bytes_per_id=exchange.id_dtype.itemsize,
    )
