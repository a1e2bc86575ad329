"""What the layout check knows about the value of a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..exchange import Block, Exchange
from ..runtime.select import SelectIds


@dataclass(frozen=True)
class Sent:
    """Columns that stand in the place of a tower's own ones, by tower: how many, how many of them a module has made, which come
    first, and the lookups whose columns lie behind them as they are."""

    widths: tuple[int, ...]
    made: tuple[int, ...]
    raw: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Rows:
    """A 2-D tensor of pooled rows of one round; ``layout(rank)`` is its block on a rank.

    With ``sent`` the columns are those that the tower of the block's owners has made of them.
    """

    layout: Callable[[int], Block]
    round: int
    sent: Sent | None = None


@dataclass(frozen=True)
class TowerRows:
    """For every row of ``rows``, what the module of the rank's tower takes ("vectors") or has made of it ("made")."""

    kind: str
    rows: Rows


@dataclass(frozen=True)
class FromTower:
    """What the module of a tower has made for the rank's own samples; ``wide`` behind the layer that brings back the old width."""

    tower: int
    wide: bool = False


@dataclass(frozen=True)
class Packed:
    """The buffer that an exchange sends: rows, one after the other."""

    rows: Rows


@dataclass(frozen=True)
class InFlight:
    """The result of a collective that nobody has waited for; ``arrived`` is what it becomes then."""

    arrived: Any


@dataclass(frozen=True)
class Buffer:
    """A received buffer of an exchange; ``sent`` as of the rows."""

    exchange: Exchange
    sent: Sent | None = None


@dataclass(frozen=True)
class Blocks:
    """The received blocks of an exchange; ``sent`` as of the rows."""

    exchange: Exchange
    sent: Sent | None = None


@dataclass(frozen=True)
class Columns:
    """Columns in declaration order: of all outputs of a round, or of the one numbered ``output``."""

    round: int
    output: int | None = None


@dataclass(frozen=True)
class Ids:
    """Ids on their way: ``kind`` says which part, ``select`` what every rank asked for, ``module`` how they are divided."""

    kind: str
    select: SelectIds
    module: Any


@dataclass(frozen=True)
class Routed:
    """Bags of each rank's lookups, over the samples of all ranks."""

    select: SelectIds
    module: Any


@dataclass(frozen=True)
class Sizes:
    """Numbers that follow from the batch sizes of all ranks; ``kind`` tells which, ``source`` of which exchange or round."""

    kind: str
    source: Any = None
