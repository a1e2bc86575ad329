"""Which rank owns which of the user's tables: the same for every graph in which a table is looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import DistributedError
from ..lookups import LookupSet
from ..partition import make_plan
from ..plan import Tower, TowerPlan
from ..runtime.groups import TowerGroups
from .averaging import Averages


@dataclass
class Ranks:
    """The process groups of one grid of towers, made once in a process, and who owns what in it.

    ``begun`` are the models, and ``alike`` the tensors, that have the same values on all ranks since the start; ``used`` are the
    parameters that a graph has used otherwise than to look rows up, and ``kept`` the tables that stay on every rank, with the
    reason. ``over`` says why exchanges have ended.
    """

    group: ProcessGroup
    exchanges: tuple[TowerGroups, ProcessGroup] | None
    rank: int
    device: torch.device
    averages: Averages = field(init=False)
    used: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    kept: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    alike: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    begun: WeakSet[nn.Module] = field(default_factory=WeakSet)
    over: str = ""

    def __post_init__(self) -> None:
        self.averages = Averages(lambda: self.dense, lambda one: self.owned(one) is not None, self.lost, self.device)

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
        """The rank that owns a table; None for what is no table.

        Raises:
            DistributedError: it was given an owner among another number of ranks.
        """
        return owner_of(parameter, self.group.size())

    def give(self, table: nn.Parameter, rank: int) -> None:
        """Let a rank own a table."""
        _OWNERS[table] = (rank, self.group.size())
        if rank != self.rank:
            # What it has gathered is not the owner's; optimizers skip what has no gradient.
            table.grad = None

    def load_of(self, model: nn.Module | None) -> list[int]:
        """How many bytes of a model's tables each rank owns; the same on all ranks."""
        load = [0] * self.group.size()
        for parameter in model.parameters() if model is not None else ():
            rank = self.owned(parameter)
            if rank is not None:
                load[rank] += parameter.numel() * parameter.element_size()
        return load

    def lost(self, error: Exception) -> DistributedError:
        """End all exchanges, because one was broken off; the error to raise for it."""
        self.end(f"an exchange was broken off on this rank ({type(error).__name__}: {error})")
        return DistributedError(
            "another rank failed, left or did not answer in time during an exchange; the error that it raised says why"
        )

    def end(self, why: str) -> None:
        """Break off whatever is under way: ranks that wait for this one get an error. The next model compiles anew."""
        if self.exchanges is None:
            return
        self.over = why
        self.averages.stop()
        for key in [key for key, ranks in RANKS.items() if ranks is self]:
            del RANKS[key]
        # Connections are closed when nobody holds the groups any more.
        (groups, dense), self.exchanges = self.exchanges, None
        groups.abort()
        dense.abort()
        if dense in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(dense)


def free(table: nn.Parameter) -> None:
    """Give the memory of a table back; it keeps its shape, with values that are no numbers."""
    if table.untyped_storage().nbytes() > table.element_size():
        table.data = torch.full((), float("nan"), dtype=table.dtype, device=table.device).expand(table.shape)


RANKS: dict[object, Ranks] = {}
"""Those of this process, by what the user asked for."""

# For as long as a table lives, because its owner alone has what it has learnt: also if exchanges end, or options change.
_OWNERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def owner_of(parameter: torch.Tensor, world: int) -> int | None:
    """The rank, of ``world``, that owns a table; None for what is no table.

    Raises:
        DistributedError: it was given an owner among another number of ranks.
    """
    found: tuple[int, int] | None = _OWNERS.get(parameter)
    if found is None:
        return None
    if found[1] != world:
        raise DistributedError(
            f"a table of this model was trained on rank {found[0]} of {found[1]}, and the ranks are {world} now: "
            "call dmt_compile.backend.full_state_dict before the process group is destroyed, and load it into another model"
        )
    return found[0]


def plan_for(lookups: LookupSet, known: Mapping[str, int], load: Sequence[int], options: tuple[object, ...]) -> TowerPlan:
    """A plan in which tables whose owner is ``known``, by name, stay where they are.

    Where ranks have a ``load`` from other graphs already, in bytes, the heaviest share of the rest goes to the rank with the least.
    ``options``: topology, towers, partition.
    """
    topology, towers, partition = options
    others = _of_tables(lookups, [table.name for table in lookups.tables if table.name not in known])
    made = make_plan(others, topology, towers, partition)  # type: ignore[arg-type]
    if not known and not any(load):
        return made
    size = {table.name: table.rows * table.dim * table.dtype.itemsize for table in lookups.tables}
    shares = sorted(made.tables_of_rank, key=lambda names: -sum(size[name] for name in names))
    ranks = sorted(range(len(shares)), key=lambda rank: load[rank] if load else 0)
    owner = dict(known)
    owner.update((name, rank) for rank, names in zip(ranks, shares, strict=True) for name in names)
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
