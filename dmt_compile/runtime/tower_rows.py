"""A tower's module between the shuffle and the peer exchange, on the rows of the rank's peers (section 3.2 of the paper)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import DistributedError
from ..lookups import LookupSet
from ..topology import TowerGrid
from ..towers.record import TowerVectors
from .base import RankContext, RankLocal
from .gradients import tie
from .pooled import MakeOutput
from .vectors import vectors_of


class _OfTower(RankLocal):
    """A step that is another one in each tower. ``records`` are the towers' modules; a tower without one has no vectors to take."""

    def __init__(self, records: Sequence[TowerVectors], grid: TowerGrid) -> None:
        super().__init__()
        self.records = tuple(records)
        self.grid = grid

    def record(self, tower: int) -> TowerVectors | None:
        return next((one for one in self.records if one.tower == tower), None)


class PickVectors(_OfTower):
    """The vectors that the rank's tower gives to its module, out of the columns behind the shuffle.

    ``arrival`` lists by tower the lookups whose columns lie there, in their order. Returns what :class:`TakeVectors` does, for the
    rows of the rank's peers.
    """

    def __init__(
        self, records: Sequence[TowerVectors], grid: TowerGrid, lookups: LookupSet, arrival: Sequence[Sequence[str]]
    ) -> None:
        super().__init__(records, grid)
        self.lookups = lookups
        self.arrival = tuple(tuple(names) for names in arrival)

    def bind(self, context: RankContext) -> nn.Module:
        tower = self.grid.tower_of(context.rank)
        record = self.record(tower)
        if record is None:
            return _Picked([], (), None)
        place = places_of(self.lookups, self.arrival[tower])
        dtype = self.lookups.lookup[record.lookups[0]].dtype
        return _Picked([place[name] for name in record.lookups], record.widths, dtype, copied=not record.passes)


class _Picked(nn.Module):
    def __init__(
        self, places: Sequence[tuple[int, int]], widths: Sequence[int], dtype: torch.dtype | None, *, copied: bool = False
    ) -> None:
        super().__init__()
        self._runs = runs_of(places)
        self._widths = tuple(widths)
        self._dtype = dtype
        self._copied = copied

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._dtype is None:
            return rows.narrow(1, 0, 0)
        parts = [rows.narrow(1, start, width).to(self._dtype) for start, width in self._runs]
        return vectors_of(parts, self._widths, copied=self._copied)


class RunTower(_OfTower):
    """The rank's tower's module, on what :class:`PickVectors` has taken; a tower without one passes its rows on."""

    def bind(self, context: RankContext) -> nn.Module:
        record = self.record(self.grid.tower_of(context.rank))
        return BoundTower(context, None if record is None or record.passes else record.target)


class BoundTower(nn.Module):
    """A tower's module on one rank. Its parameters are registered in the rank's module tree, and not here.

    Raises:
        DistributedError: when called, the last backward did not reach all of its parameters.
    """

    def __init__(self, context: RankContext, target: str | None) -> None:
        super().__init__()
        self._context = context
        self._target = target

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        if self._target is None:
            return vectors
        synchronised = self._context.tower
        run = synchronised if synchronised is not None else self._context.root.get_submodule(self._target)
        try:
            made: torch.Tensor = run(vectors)
        except RuntimeError as error:
            unused = _without_gradient(error, run)
            if unused is None:
                raise
            raise DistributedError(
                f"the module '{self._target}' of this rank's tower ({type(run.module).__name__}) did not use all of its parameters "
                f"in the last step{unused}: call program.distribute(find_unused_parameters=True), or freeze what it never uses"
            ) from error
        return made


_UNFINISHED = "Expected to have finished reduction in the prior iteration"


def _without_gradient(error: RuntimeError, run: nn.Module) -> str | None:
    """What DistributedDataParallel says of parameters that its last backward did not reach; None if it is another error."""
    if not isinstance(run, DistributedDataParallel) or _UNFINISHED not in str(error):
        return None
    told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    names = [name for name, parameter in run.module.named_parameters() if parameter.requires_grad]
    numbers = [int(number) for number in told[1].split()] if told else []
    missing = [names[number] for number in numbers if number < len(names)]
    return f": {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}" if missing else ""


class SendColumns(_OfTower):
    """What crosses to the peers: what the tower's module has made, then the columns that are needed as they are.

    ``raw`` are the lookups of such columns; ``arrival`` is that of :class:`PickVectors`, whose order they keep. All travel as
    ``dtype``.
    """

    def __init__(
        self,
        records: Sequence[TowerVectors],
        grid: TowerGrid,
        lookups: LookupSet,
        arrival: Sequence[Sequence[str]],
        raw: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(records, grid)
        self.lookups = lookups
        self.arrival = tuple(tuple(names) for names in arrival)
        self.raw = frozenset(raw)
        self.dtype = dtype

    def raw_of(self, tower: int) -> tuple[str, ...]:
        """The lookups whose columns tower ``tower`` sends as they are, in their order."""
        return tuple(name for name in self.arrival[tower] if name in self.raw)

    @property
    def made(self) -> tuple[int, ...]:
        """Columns that each tower's module makes, by tower."""
        found = [self.record(tower) for tower in range(self.grid.towers)]
        return tuple(0 if record is None else record.columns for record in found)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that each tower sends, by tower."""
        return tuple(
            made + sum(self.lookups.lookup[name].dim for name in self.raw_of(tower)) for tower, made in enumerate(self.made)
        )

    def bind(self, context: RankContext) -> nn.Module:
        tower = self.grid.tower_of(context.rank)
        place = places_of(self.lookups, self.arrival[tower])
        return _Sent(self.made[tower], [place[name] for name in self.raw_of(tower)], self.dtype)


class _Sent(nn.Module):
    def __init__(self, made: int, places: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self._made = made
        self._runs = runs_of(places)
        self._dtype = dtype

    def forward(self, made: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sent = made.reshape(len(rows), self._made).to(self._dtype)
        if self._runs:
            return torch.cat([sent, *(rows.narrow(1, start, width) for start, width in self._runs)], dim=1)
        # All ranks take part in the exchanges of the backward, or others wait: also where a module's result does not depend on its
        # rows, or is made without gradients. Tables behind it then get a gradient of zeros.
        return tie(sent, rows) if rows.requires_grad and torch.is_grad_enabled() else sent


class TowerColumns(nn.Module):
    """What the module of a tower has made for the rank's own samples, (B, ``columns``), out of the blocks of the peer exchange."""

    def __init__(self, tower: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tower = tower
        self.columns = columns
        self.dtype = dtype

    def forward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        return blocks[self.tower].narrow(1, 0, self.columns).to(self.dtype)

    def extra_repr(self) -> str:
        return f"tower={self.tower}, columns={self.columns}"


class ReplacedOutput(nn.Module):
    """The value that a lookup of the flat model returns, where towers have taken all of its columns.

    ``places`` say which columns of which given tensor (number, first column, columns) lie one behind the other; ``make`` gives them
    the value's form, for which it may need the value that comes last.
    """

    def __init__(self, places: Sequence[tuple[int, int, int]], make: MakeOutput) -> None:
        super().__init__()
        self.places = tuple(places)
        self.make = make

    def forward(self, *given: torch.Tensor) -> object:
        parts = [given[number].narrow(1, start, width) for number, start, width in self.places]
        columns = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.make.output.shape is not None:
            # As what it stands for: layers behind would else add up in another order.
            columns = columns.contiguous()
        return self.make(columns, given[-1] if self.make.output.like is not None else None)


def places_of(lookups: LookupSet, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """First column and columns of each lookup, where they lie side by side."""
    place: dict[str, tuple[int, int]] = {}
    start = 0
    for name in names:
        width = lookups.lookup[name].dim
        place[name] = (start, width)
        start += width
    return place


def runs_of(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours that stay neighbours as one."""
    runs: list[tuple[int, int]] = []
    for start, width in places:
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + width)
        else:
            runs.append((start, width))
    return runs
