"""Spread tables over towers, then over the ranks of each tower.

The unit is a table together with all lookups that read it: SPTT needs every table inside one tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import PlanError
from ..lookups import Lookup, LookupSet, Table
from ..plan import Tower, TowerPlan, resolve_feature_groups
from ..topology import Topology, TowerGrid

Assign = Callable[[Sequence[Table], LookupSet, int], list[list[Table]]]


def strided(tables: Sequence[Table], lookups: LookupSet, bins: int) -> list[list[Table]]:
    """The paper's naive assignment (section 3.3): bin b gets tables b, b + bins, b + 2 bins, ..."""
    return [list(tables[start::bins]) for start in range(bins)]


def balanced(tables: Sequence[Table], lookups: LookupSet, bins: int) -> list[list[Table]]:
    """Even out lookup cost and memory: heaviest table first, each to the bin whose larger share grows least.

    Cost is the number of columns of a sample of the example inputs (what is read and what travels); memory is the table's bytes.
    Both are shares of their totals, so that neither unit dominates. Tables keep declaration order inside a bin.
    """
    if not tables:
        return [[] for _ in range(bins)]
    columns = _shares([sum(map(lookups.columns_per_sample, lookups.lookups_of_table[t.name])) for t in tables])
    memory = _shares([t.bytes for t in tables])
    # A stable sort and argmin's first minimum make the result the same on every rank.
    order = torch.sort(torch.maximum(columns, memory), descending=True, stable=True).indices.tolist()
    # Two vectors and not one (bins, 2) tensor: max(dim) starts all threads however small, and waits for them if busy.
    loads = torch.zeros(2, bins, dtype=torch.float64, device="cpu").unbind()
    shares = list(zip(columns.tolist(), memory.tolist(), strict=True))
    bin_of = [0] * len(tables)
    for position in order:
        after = [load + share for load, share in zip(loads, shares[position], strict=True)]
        target = int((torch.maximum(*after) + 1e-3 * torch.add(*after)).argmin())
        for load, share in zip(loads, shares[position], strict=True):
            load[target] += share
        bin_of[position] = target
    result: list[list[Table]] = [[] for _ in range(bins)]
    for position, table in enumerate(tables):
        result[bin_of[position]].append(table)
    return result


def _shares(amounts: Sequence[float]) -> torch.Tensor:
    values = torch.tensor([float(amount) for amount in amounts], dtype=torch.float64, device="cpu")
    return values / values.sum().clamp(min=1)


_PARTITIONS: dict[str, Assign] = {"balanced": balanced, "strided": strided}


def make_plan(
    lookups: LookupSet,
    topology: Topology,
    towers: int | Sequence[Sequence[str]] | TowerPlan | None = None,
    partition: str = "balanced",
) -> TowerPlan:
    """Make, or check, the plan that ``towers`` asks for; None means one tower per host.

    Raises:
        PlanError: an unknown partition, a plan made for another topology, or one that does not fit the model.
        TopologyError: a number of towers that the topology cannot have.
    """
    if isinstance(towers, TowerPlan):
        if towers.topology != topology:
            raise PlanError(f"the plan was made for {towers.topology}, towerize was called with {topology}")
        towers.validate(lookups)
        return towers
    if partition not in _PARTITIONS:
        raise PlanError(f"partition must be one of {', '.join(map(repr, _PARTITIONS))}, got {partition!r}")
    assign = _PARTITIONS[partition]
    if towers is None:
        towers = topology.hosts
    if isinstance(towers, str) or not isinstance(towers, int | Sequence):
        raise PlanError(
            f"towers must be None, a number, a list of lists of feature names, or a TowerPlan; got {type(towers).__name__}"
        )
    if isinstance(towers, int):
        grid = TowerGrid.of(topology, towers)
        groups = assign(lookups.tables, lookups, grid.towers)
    else:
        grid = TowerGrid.of(topology, len(towers))
        groups = _tables_of(resolve_feature_groups(towers, lookups), lookups, grid.towers)
        partition = "explicit"
    tower_of = {table.name: index for index, group in enumerate(groups) for table in group}
    features: list[list[str]] = [[] for _ in groups]
    for lookup in lookups.lookups:
        features[tower_of[lookup.table]].append(lookup.name)
    plan = TowerPlan(
        topology,
        tuple(
            Tower(
                features=tuple(features[index]),
                ranks=tuple(grid.tower_ranks(index)),
                tables=tuple(tuple(t.name for t in part) for part in assign(group, lookups, grid.ranks_per_tower)),
            )
            for index, group in enumerate(groups)
        ),
        partition,
    )
    plan.validate(lookups)
    return plan


def _tables_of(groups: Sequence[Sequence[Lookup]], lookups: LookupSet, towers: int) -> list[list[Table]]:
    tower_of = {lookup.table: index for index, group in enumerate(groups) for lookup in group}
    result: list[list[Table]] = [[] for _ in range(towers)]
    for position, table in enumerate(lookups.tables):
        # A table that nothing reads is bound to no tower; it still needs an owner.
        result[tower_of.get(table.name, position % towers)].append(table)
    return result
