"""The exchanges of the classic and the SPTT scheme as frozen records: which rows and columns go to whom.

A record knows no batch sizes. A block of data is named by the ranks whose samples are its rows and the ranks whose tables
made its columns; sizes follow once the batch size of every rank is known. The runtime, the layout check, the traffic count
and the renderer all read the same record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from .lookups import Unit
from .topology import Topology, TowerGrid

Axis = Literal["world", "tower", "peer"]


@dataclass(frozen=True)
class Block:
    """Rows: all samples of the ranks ``rows``, in that order. Columns: all pooled columns of ``owners``, in that order."""

    rows: Sequence[int]
    owners: Sequence[int]

    def same_as(self, other: Block) -> bool:
        """Equal contents, whatever the sequence types."""
        return _equal(self.rows, other.rows) and _equal(self.owners, other.owners)

    def __str__(self) -> str:
        return f"rows of ranks {_short(self.rows)} x columns of ranks {_short(self.owners)}"


def _equal(a: Sequence[int], b: Sequence[int]) -> bool:
    # Python compares a tuple with itself element by element, here for every rank.
    if a is b:
        return True
    if type(a) is type(b):
        return a == b
    return len(a) == len(b) and tuple(a) == tuple(b)


def _short(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2:
        return f"{ranks[0]}..{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)})"


@dataclass(frozen=True)
class Exchange:
    """An AlltoAll of pooled rows along one axis of the tower grid (section 3.1).

    ``axis`` names the process group: "world" (classic scheme), "tower" (step d) or "peer" (step g). ``widths`` holds the
    number of pooled columns that each rank's tables make, ``itemsize`` the bytes of one value. Where towers' modules run before the
    exchange among peers, ``tower_widths`` holds the number of columns that each tower sends instead. A rank cuts its rows into one
    run per member of its group and sends every run with all its columns; all sizes may differ. ``unit`` is what a row belongs to,
    ``round`` the number of the round of exchanges, of ``rounds``.
    """

    axis: Axis
    grid: TowerGrid
    widths: tuple[int, ...]
    itemsize: int = 4
    unit: Unit = "sample"
    round: int = 0
    rounds: int = 1
    tower_widths: tuple[int, ...] | None = None

    def members(self, rank: int) -> Sequence[int]:
        """The ranks of ``rank``'s group, in group order."""
        if self.axis == "world":
            return range(self.grid.world_size)
        if self.axis == "tower":
            return self.grid.tower_ranks(self.grid.tower_of(rank))
        return self.grid.peers(self.grid.index_of(rank))

    def rows_to(self, member: int) -> Sequence[int]:
        """The ranks whose samples are sent to ``member``."""
        return self.grid.peers(self.grid.index_of(member)) if self.axis == "tower" else (member,)

    def owners(self, rank: int) -> Sequence[int]:
        """The ranks whose columns ``rank`` holds and sends."""
        return self.grid.tower_ranks(self.grid.tower_of(rank)) if self.axis == "peer" else (rank,)

    def source(self, rank: int) -> Block:
        """The layout that the tensor handed to the exchange must have on ``rank``."""
        if self.axis == "world":
            rows: Sequence[int] = range(self.grid.world_size)
        elif self.axis == "tower":
            rows = self._peer_order
        else:
            rows = self.grid.peers(self.grid.index_of(rank))
        return Block(rows, self.owners(rank))

    def sent(self, rank: int) -> list[Block]:
        """What ``rank`` sends, one block per member."""
        owners = self.owners(rank)
        return [Block(self.rows_to(member), owners) for member in self.members(rank)]

    def received(self, rank: int) -> list[Block]:
        """What ``rank`` receives, one block per member."""
        rows = self.rows_to(rank)
        return [Block(rows, self.owners(member)) for member in self.members(rank)]

    def width(self, owners: Sequence[int]) -> int:
        """Columns of ``owners`` together; with ``tower_widths``, of the tower whose ranks they are."""
        if self.tower_widths is not None:
            return self.tower_widths[self.grid.tower_of(owners[0])]
        return sum(self.widths[owner] for owner in owners)

    def sizes(self, blocks: Sequence[Block], batch_sizes: Sequence[int]) -> list[int]:
        """Number of values in each block, given every rank's batch size."""
        return [sum(batch_sizes[row] for row in block.rows) * self.width(block.owners) for block in blocks]

    def traffic(self, rank: int, topology: Topology, batch_sizes: Sequence[int]) -> tuple[int, int]:
        """Bytes that ``rank`` sends to others inside its host, and across hosts, in the forward direction."""
        return split_traffic(rank, topology, self.members(rank), self.sizes(self.sent(rank), batch_sizes), self.itemsize)

    def columns_sent(self) -> list[int]:
        """Columns of the rows that each rank sends."""
        if self.axis != "peer":
            return list(self.widths)
        # The same on all ranks of a tower, which may be many.
        towers = [self.width(self.grid.tower_ranks(tower)) for tower in range(self.grid.towers)]
        return [towers[self.grid.tower_of(rank)] for rank in range(self.grid.world_size)]

    def traffic_by_rank(self, topology: Topology) -> list[tuple[int, int]]:
        """:meth:`traffic` of every rank, inside its host and across hosts, with one sample on each rank.

        All ranks have equally many members of their group on their own host and elsewhere, and send each of them equally many rows
        with all their columns: what rank 0 sends for one column, times the columns. Asking rank by rank is quadratic in the world.
        """
        world = self.grid.world_size
        unit = replace(self, widths=(1,) * world, tower_widths=None)
        columns = unit.width(unit.owners(0))
        inside, across = (total // columns for total in unit.traffic(0, topology, (1,) * world))
        return [(inside * width, across * width) for width in self.columns_sent()]

    def crosses_hosts(self, topology: Topology) -> bool:
        """Whether any rank's group spans hosts."""
        if self.axis == "tower":
            return self.grid.ranks_per_tower > topology.ranks_per_host
        return topology.hosts > 1 and (self.axis == "world" or self.grid.towers > 1)

    @cached_property
    def _peer_order(self) -> tuple[int, ...]:
        return self.grid.peer_order()


def split_traffic(rank: int, topology: Topology, members: Sequence[int], sizes: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Bytes of ``sizes`` values that go from ``rank`` to other members inside its host, and across hosts."""
    inside = across = 0
    home = topology.host_of(rank)
    for member, size in zip(members, sizes, strict=True):
        if member == rank:
            continue
        if topology.host_of(member) == home:
            inside += size * itemsize
        else:
            across += size * itemsize
    return inside, across


@dataclass(frozen=True)
class IdExchange:
    """Step a: every rank sends each rank the ids of the features whose tables that rank owns.

    All ranks list the features alike, ordered by destination: rank r gets a run of ``features_per_rank[r]`` features, of
    which those at the places ``weighted_per_rank[r]`` inside the run come with weights. Ids travel as ``id_dtype``. ``unit`` and
    ``round`` are those of the :class:`Exchange` that brings the rows back.
    """

    world_size: int
    features_per_rank: tuple[int, ...]
    weighted_per_rank: tuple[tuple[int, ...], ...]
    id_dtype: torch.dtype
    unit: Unit = "sample"
    round: int = 0

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's run of features starts in the request; one more entry marks the end."""
        starts = [0]
        for count in self.features_per_rank:
            starts.append(starts[-1] + count)
        return tuple(starts)

    @property
    def carries_weights(self) -> bool:
        return any(self.weighted_per_rank)
