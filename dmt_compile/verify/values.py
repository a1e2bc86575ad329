"""What the layout check knows about the value of a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..exchange import Block, Exchange
from ..runtime.select import SelectIds


@dataclass(frozen=True)
class Rows:
    """A 2-D tensor of pooled rows of one round; ``layout(rank)`` is its block on a rank."""

    layout: Callable[[int], Block]
    round: int


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
    """A received buffer of an exchange."""

    exchange: Exchange


@dataclass(frozen=True)
class Blocks:
    """The received blocks of an exchange."""

    exchange: Exchange


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
