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

from dmt_compile.exchange import Exchange, IdExchange
from dmt_compile.runtime.ids import LocalBags, RouteIds, SelectIds
from dmt_compile.runtime.pooled import ExchangeRows, JoinColumns, RankLookups, RestoreColumns
from dmt_compile.stage import Stage
from dmt_compile.verify.layout import check_layout

from .base import Draft, GraphPass


@dataclass(frozen=True)
class ClassicExchange(GraphPass):
    name: ClassVar[str] = "classic-exchange"
    takes: ClassVar[str] = "towers"
    makes: ClassVar[str] = "classic"
    ensures = (check_layout,)

    def rewrite(self, draft: Draft) -> None:
        lookups, plan = draft.stage.lookups, draft.stage.plan
        (bags,) = draft.calls(LocalBags)
        (columns,) = draft.calls(JoinColumns)
        towers = list(columns.args)
        per_rank = plan.lookups_of_rank(lookups)
        select, route, bag_of = _routing(draft.stage)
        dtype = lookups.exchange_dtype
        widths = tuple(sum(x.dim for x in served) for served in per_rank)
        exchange = Exchange("world", plan.grid, widths, dtype.itemsize)
        ids = list(bags.args)
        with draft.placing(before=bags, like=bags, step="a"):
            routed = draft.call("route", RouteIds(select, route), *ids)
            sizes = draft.function("batch_sizes", getattr, routed, "batch_sizes")
        with draft.placing(before=bags, like=bags, step="b"):
            pooled = draft.call("lookup", RankLookups(per_rank, bag_of, lookups.table, dtype), routed)
        with draft.placing(before=bags, like=bags, step="exchange"):
            received = draft.call("exchange_world", ExchangeRows(exchange), pooled, sizes)
            arrival = [[x.name for x in served] for served in per_rank]
            restored = draft.call("restore", RestoreColumns(lookups, arrival), received)
        columns.replace_all_uses_with(restored)
        draft.erase(columns)
        for tower in reversed(towers):
            draft.erase(tower)  # type: ignore[arg-type]
        draft.erase(bags)


def _routing(stage: Stage) -> tuple[SelectIds, IdExchange, list[list[int]]]:
    """What every rank asks for, the record of the exchange, and per rank the bag that each of its lookups reads.

    A feature that two tables of one rank read travels to that rank once.
    """
    lookups, plan = stage.lookups, stage.plan
    entries: list[tuple[int, str]] = []
    weighted: list[int] = []
    rows: list[int] = []
    counts: list[int] = []
    weighted_per_rank: list[tuple[int, ...]] = []
    bag_of: list[list[int]] = []
    for served in plan.lookups_of_rank(lookups):
        place: dict[tuple[int, str], int] = {}
        needs_weights: set[int] = set()
        limit: dict[int, int] = {}
        places = []
        for lookup in served:
            index = place.setdefault((lookup.source, lookup.feature), len(place))
            places.append(index)
            table_rows = lookups.table[lookup.table].rows
            limit[index] = min(limit.get(index, table_rows), table_rows)
            if lookup.weighted:
                needs_weights.add(index)
        weighted.extend(len(entries) + index for index in sorted(needs_weights))
        weighted_per_rank.append(tuple(sorted(needs_weights)))
        rows.extend(limit[index] for index in range(len(place)))
        entries.extend(place)
        counts.append(len(place))
        bag_of.append(places)
    # Ids are checked against their table before they travel, so the narrower type loses nothing.
    narrow = max(table.rows for table in lookups.tables) <= torch.iinfo(torch.int32).max
    exchange = IdExchange(plan.topology.world_size, tuple(counts), tuple(weighted_per_rank), torch.int32 if narrow else torch.int64)
    return SelectIds(entries, weighted, rows, lookups.sources), exchange, bag_of
