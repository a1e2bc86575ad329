"""Which feature belongs to which tower, and which rank owns which table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import PlanError
from .lookups import Lookup, LookupSet
from .topology import Topology, TowerGrid

_FORMAT = 1


@dataclass(frozen=True)
class Tower:
    """One tower: the features it serves, its ranks, and for each of those ranks the tables it owns."""

    features: tuple[str, ...]
    ranks: tuple[int, ...]
    tables: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TowerPlan:
    """A partition of a model's lookups and tables over the ranks of a topology.

    ``features`` of a tower are lookup names (:attr:`LookupSet.lookup`): the feature's name, or ``feature@table`` where one
    feature is looked up in several tables. ``partition`` records how the plan was made.
    """

    topology: Topology
    towers: tuple[Tower, ...]
    partition: str = "explicit"

    @cached_property
    def grid(self) -> TowerGrid:
        return TowerGrid.of(self.topology, len(self.towers))

    @cached_property
    def tables_of_rank(self) -> tuple[tuple[str, ...], ...]:
        """The tables that each rank owns, by rank."""
        owned: dict[int, tuple[str, ...]] = {}
        for tower in self.towers:
            owned.update(zip(tower.ranks, tower.tables, strict=True))
        return tuple(owned[rank] for rank in range(self.topology.world_size))

    def validate(self, lookups: LookupSet) -> None:
        """Check the plan against a model.

        Raises:
            PlanError: a tower whose ranks are not the ones the grid gives it, a table or a feature that is missing, unknown,
                or stands twice, or a feature whose table is owned by another tower.
        """
        grid = self.grid
        table_tower: dict[str, int] = {}
        feature_tower: dict[str, int] = {}
        for index, tower in enumerate(self.towers):
            expected = tuple(grid.tower_ranks(index))
            if tower.ranks != expected:
                raise PlanError(f"tower {index} must be served by ranks {list(expected)}, the plan says {list(tower.ranks)}")
            if len(tower.tables) != len(tower.ranks):
                raise PlanError(
                    f"tower {index} has {len(tower.ranks)} ranks but lists the tables of {len(tower.tables)}: one list of tables "
                    "per rank is needed, empty for a rank that owns none"
                )
            for rank, names in zip(tower.ranks, tower.tables, strict=True):
                for name in names:
                    if name not in lookups.table:
                        raise PlanError(f"rank {rank} of tower {index} is given table '{name}', which the model does not have")
                    if name in table_tower:
                        raise PlanError(
                            f"table '{name}' is owned twice: in tower {table_tower[name]} and by rank {rank} of tower {index}"
                        )
                    table_tower[name] = index
            for name in tower.features:
                if name not in lookups.lookup:
                    raise PlanError(f"tower {index} is given feature '{name}', which the model does not look up")
                if name in feature_tower:
                    raise PlanError(f"feature '{name}' stands in tower {feature_tower[name]} and again in tower {index}")
                feature_tower[name] = index
        for table in lookups.tables:
            if table.name not in table_tower:
                raise PlanError(f"table '{table.name}' is owned by no rank")
        for lookup in lookups.lookups:
            if lookup.name not in feature_tower:
                raise PlanError(f"feature '{lookup.name}' is in no tower")
            if feature_tower[lookup.name] != table_tower[lookup.table]:
                raise PlanError(
                    f"feature '{lookup.name}' is in tower {feature_tower[lookup.name]} but its table '{lookup.table}' is owned in "
                    f"tower {table_tower[lookup.table]}"
                )

    def lookups_of_rank(self, lookups: LookupSet) -> tuple[tuple[Lookup, ...], ...]:
        """The lookups that each rank serves, by rank: table by table in the plan's order, then declaration order."""
        by_table = lookups.lookups_of_table
        return tuple(tuple(lookup for table in tables for lookup in by_table[table]) for tables in self.tables_of_rank)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON text; :meth:`from_json` reads it back."""
        return json.dumps(self._as_dict(), indent=indent, sort_keys=True)

    def _as_dict(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "topology": {"hosts": self.topology.hosts, "ranks_per_host": self.topology.ranks_per_host},
            "partition": self.partition,
            "towers": [
                {"features": list(t.features), "ranks": list(t.ranks), "tables": [list(names) for names in t.tables]}
                for t in self.towers
            ],
        }

    @classmethod
    def from_json(cls, text: str) -> TowerPlan:
        """Read a plan written by :meth:`to_json`.

        Raises:
            PlanError: the text is not JSON, or not a plan of a format that this version knows.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"a tower plan must be JSON: {error}") from None
        if not isinstance(data, dict):
            raise PlanError(f"a tower plan must be a JSON object, got {type(data).__name__}")
        if data.get("format") != _FORMAT:
            raise PlanError(f"this version reads tower plans of format {_FORMAT}, got format {data.get('format')!r}")
        try:
            towers = tuple(
                Tower(
                    _names(t["features"]),
                    _ranks(t["ranks"]),
                    tuple(_names(names) for names in t["tables"]),
                )
                for t in data["towers"]
            )
            topology = Topology(data["topology"]["hosts"], data["topology"]["ranks_per_host"])
            return cls(topology, towers, str(data["partition"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the tower plan is malformed: {type(error).__name__}: {error}") from error

    @cached_property
    def hash(self) -> str:
        """Hex digest of what the plan decides (not of how it was made); equal on every machine and in every process."""
        decided = {key: value for key, value in self._as_dict().items() if key != "partition"}
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def _names(values: Iterable[object]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError(f"expected a list of names, got the text {values!r}")
    names = tuple(values)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"expected a name, got {name!r}")
    return names  # type: ignore[return-value]


def _ranks(values: Iterable[object]) -> tuple[int, ...]:
    ranks = tuple(values)
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"expected a rank, got {rank!r}")
    return ranks  # type: ignore[return-value]


def resolve_feature_groups(groups: Sequence[Sequence[str]], lookups: LookupSet) -> list[list[Lookup]]:
    """Turn a user's lists of feature names, one list per tower, into lookups per tower.

    A name is a lookup name, or a feature's name, which then stands for every lookup of that feature.

    Raises:
        PlanError: an unknown name, a feature in no tower or in two, or two features of one table in different towers.
    """
    by_feature: dict[str, list[Lookup]] = {}
    for lookup in lookups.lookups:
        by_feature.setdefault(lookup.feature, []).append(lookup)
    tower_of: dict[str, int] = {}
    for index, group in enumerate(groups):
        if isinstance(group, str) or not isinstance(group, Iterable):
            what = f"the text {group!r}" if isinstance(group, str) else f"of type {type(group).__name__}"
            raise PlanError(f"towers[{index}] is {what}: each tower is a list of feature names")
        for name in group:
            found = [lookups.lookup[name]] if name in lookups.lookup else by_feature.get(name, [])
            if not found:
                raise PlanError(
                    f"towers[{index}] names feature '{name}', which the model does not look up; it has {_some(lookups.lookup)}"
                )
            for lookup in found:
                if lookup.name in tower_of:
                    raise PlanError(
                        f"feature '{lookup.name}' stands in towers[{tower_of[lookup.name]}] and again in towers[{index}]"
                    )
                tower_of[lookup.name] = index
    left = [name for name in lookups.lookup if name not in tower_of]
    if left:
        raise PlanError(f"every feature needs a tower; in none: {_some(left)}")
    for table, readers in lookups.lookups_of_table.items():
        places = {tower_of[lookup.name] for lookup in readers}
        if len(places) > 1:
            first, second = readers[0], next(x for x in readers if tower_of[x.name] != tower_of[readers[0].name])
            raise PlanError(
                f"features '{first.name}' and '{second.name}' read the same table '{table}' but stand in towers "
                f"{tower_of[first.name]} and {tower_of[second.name]}: a table lives in one tower, put both there"
            )
    result: list[list[Lookup]] = [[] for _ in groups]
    for lookup in lookups.lookups:
        result[tower_of[lookup.name]].append(lookup)
    return result


def _some(names: Iterable[str] | Mapping[str, object], limit: int = 8) -> str:
    names = list(names)
    if not names:
        return "none"
    text = ", ".join(f"'{name}'" for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
