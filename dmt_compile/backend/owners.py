"""Which rank owns which of the user's tables: the same for every graph in which a table is looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import DistributedError
from ..lookups import LookupSet
from ..partition import make_plan
from ..plan import Tower, TowerPlan
from ..runtime.groups import TowerGroups
from .averaging import Averaging


@dataclass
class Ranks:
    """The process groups of one grid of towers, made once in a process, and who owns what in it.

    ``alike`` holds the parameters that have been given the same values on all ranks, ``anchor`` is the further argument of
    rewritten graphs, ``over`` says why exchanges have ended.
    """

    group: ProcessGroup
    exchanges: tuple[TowerGroups, ProcessGroup] | None
    rank: int
    anchor: torch.Tensor
    averaging: Averaging = field(init=False)
    owner: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    alike: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    over: str = ""

    def __post_init__(self) -> None:
        self.averaging = Averaging(lambda: self.dense, lambda parameter: self.owned(parameter) is not None)

    @property
    def groups(self) -> TowerGroups:
        """What rows and ids are exchanged in."""
        return self._made()[0]

    @property
    def dense(self) -> ProcessGroup:
        """What gradients are averaged over: all ranks."""
        return self._made()[1]

    def _made(self) -> tuple[TowerGroups, ProcessGroup]:
        self.refuse_if_over()
        assert self.exchanges is not None
        return self.exchanges

    def refuse_if_over(self) -> None:
        """Raise, with the reason, where exchanges have ended.

        Raises:
            DistributedError: they have.
        """
        if self.exchanges is None:
            raise DistributedError(f"this model cannot run any more: {self.over}; start the ranks again")

    def owned(self, parameter: torch.Tensor) -> int | None:
        """The rank that owns a table; None for what is no table."""
        found: int | None = self.owner.get(parameter)
        return found

    def end(self, why: str) -> None:
        """Break off whatever is under way: ranks that wait for this one get an error. The next model compiles anew."""
        if self.exchanges is None:
            return
        self.over = why
        for key in [key for key, ranks in RANKS.items() if ranks is self]:
            del RANKS[key]
        # Connections are closed when nobody holds the groups any more.
        (groups, dense), self.exchanges = self.exchanges, None
        groups.abort()
        dense.abort()
        if dense in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(dense)


RANKS: dict[object, Ranks] = {}
"""Those of this process, by process group and what the user asked for."""


def plan_for(lookups: LookupSet, known: Mapping[str, int], options: tuple[object, ...]) -> TowerPlan:
    """A plan in which tables whose owner is ``known``, by name, stay where they are. ``options``: topology, towers, partition."""
    topology, towers, partition = options
    others = _of_tables(lookups, [table.name for table in lookups.tables if table.name not in known])
    made = make_plan(others, topology, towers, partition)  # type: ignore[arg-type]
    if not known:
        return made
    owner = dict(known)
    owner.update((name, rank) for rank, names in enumerate(made.tables_of_rank) for name in names)
    return TowerPlan(made.topology, tuple(_tower(tower, lookups, owner) for tower in made.towers), made.partition)


def _of_tables(lookups: LookupSet, names: Sequence[str]) -> LookupSet:
    return replace(
        lookups,
        tables=tuple(table for table in lookups.tables if table.name in names),
        lookups=tuple(lookup for lookup in lookups.lookups if lookup.table in names),
    )


def _tower(tower: Tower, lookups: LookupSet, owner: Mapping[str, int]) -> Tower:
    tables = tuple(tuple(table.name for table in lookups.tables if owner[table.name] == rank) for rank in tower.ranks)
    own = {name for names in tables for name in names}
    return Tower(tuple(x.name for x in lookups.lookups if x.table in own), tower.ranks, tables)
