"""towers -> classic: ids to the owners, local lookups, one global exchange of pooled rows: today's practice.

bags    = dmt.bags(ids_0)            routed   = dmt.route(ids_0)                     # step a
tower_0 = dmt.tower_0(bags)   ==>    batch_sizes = routed.batch_sizes
tower_1 = dmt.tower_1(bags)          pooled   = dmt.lookup(routed)                   # step b
columns = dmt.columns(...)           received = dmt.exchange_world(pooled, batch_sizes)
                                     columns  = dmt.columns(received)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from dmt_compile.exchange import Exchange, IdExchange
from dmt_compile.lookups import ANY, LookupSet
from dmt_compile.plan import TowerPlan
from dmt_compile.runtime.ids import RouteIds
from dmt_compile.runtime.pooled import ExchangeRows, RestoreColumns
from dmt_compile.runtime.select import LocalBags, SelectIds
from dmt_compile.runtime.tables import RankLookups
from dmt_compile.verify.layout import check_layout

from .base import Draft, GraphPass


@dataclass(frozen=True)
class ClassicExchange(GraphPass):
    name: ClassVar[str] = "classic-exchange"
    takes: ClassVar[tuple[str, ...]] = ("towers",)
    makes: ClassVar[str] = "classic"
    ensures = (check_layout,)

    def rewrite(self, draft: Draft) -> None:
        rounds = draft.stage.lookups.rounds
        for bags in draft.calls(LocalBags):
            module = draft.module(bags)
            assert isinstance(module, LocalBags)
            _exchange(draft, bags, module.round, rounds)


def _exchange(draft: Draft, bags: fx.Node, number: int, rounds: tuple[LookupSet, ...]) -> None:
    """Replace the lookups of one round on one device by the owners' and an exchange."""
    plan, lookups = draft.stage.plan, rounds[number]
    towers = list(bags.users)
    (columns,) = towers[0].users
    per_rank = plan.lookups_of_rank(lookups)
    select, route, bag_of = _routing(lookups, plan, number)
    dtype = lookups.exchange_dtype
    widths = tuple(sum(x.dim for x in served) for served in per_rank)
    exchange = Exchange("world", plan.grid, widths, dtype.itemsize, lookups.unit, number, len(rounds))
    ids = list(bags.args)
    with draft.placing(before=bags, like=bags, step="a", round=number):
        routed = draft.call("route", RouteIds(select, route), *ids)
        sizes = draft.function("batch_sizes", getattr, routed, "batch_sizes")
    with draft.placing(before=bags, like=bags, step="b", round=number):
        pooled = draft.call("lookup", RankLookups(per_rank, bag_of, lookups.table, dtype), routed)
    with draft.placing(before=bags, like=bags, step="exchange", round=number):
        received = draft.call("exchange_world", ExchangeRows(exchange), pooled, sizes)
        arrival = [[x.name for x in served] for served in per_rank]
        restored = draft.call("restore", RestoreColumns(lookups, arrival), received)
    columns.replace_all_uses_with(restored)
    draft.erase(columns)
    for tower in reversed(towers):
        draft.erase(tower)
    draft.erase(bags)


def _routing(lookups: LookupSet, plan: TowerPlan, number: int) -> tuple[SelectIds, IdExchange, list[list[int]]]:
    """What every rank asks for, the record of the exchange, and per rank the bag that each of its lookups reads.

    A feature that two tables of one rank read travels to that rank once.
    """
    entries: list[tuple[int, str]] = []
    weighted: list[int] = []
    limits: list[tuple[int, int]] = []
    tables: list[str] = []
    counts: list[int] = []
    weighted_per_rank: list[tuple[int, ...]] = []
    bag_of: list[list[int]] = []
    for served in plan.lookups_of_rank(lookups):
        place: dict[tuple[int, str], int] = {}
        needs_weights: set[int] = set()
        limit: dict[int, tuple[int, int]] = {}
        places = []
        for lookup in served:
            index = place.setdefault((lookup.source, lookup.feature), len(place))
            places.append(index)
            table = lookups.table[lookup.table]
            low, high = limit.get(index, (table.start, table.end))
            limit[index] = (max(low, table.start), min(high, table.end))
            if lookup.weighted:
                needs_weights.add(index)
        weighted.extend(len(entries) + index for index in sorted(needs_weights))
        weighted_per_rank.append(tuple(sorted(needs_weights)))
        limits.extend(limit[index] for index in range(len(place)))
        read = {index: lookup.table for index, lookup in reversed(list(zip(places, served, strict=True)))}
        tables.extend(read[index] for index in range(len(place)))
        entries.extend(place)
        counts.append(len(place))
        bag_of.append(places)
    # Ids are checked against their table before they travel, so the narrower type loses nothing.
    narrow = max(table.end for table in lookups.tables) <= torch.iinfo(torch.int32).max
    id_dtype = torch.int32 if narrow else torch.int64
    world = plan.topology.world_size
    exchange = IdExchange(world, tuple(counts), tuple(weighted_per_rank), id_dtype, lookups.unit, number)
    partial = any(len(tables) > 1 for tables in lookups.shards.values())
    greatest = {x.source for x in lookups.lookups if x.sequence == ANY and x.pooling in ("max", "amax")}
    return SelectIds(entries, weighted, limits, lookups.sources, partial, tables, sorted(greatest)), exchange, bag_of
