"""flat -> towers: one subgraph of lookups per tower, columns put back in declaration order.

One such group of nodes for each round of exchanges.

kt = ebc(kjt)                        ids_0   = dmt.ids_0(kjt)
                                     bags    = dmt.bags(ids_0, ...)
                           ==>       tower_0 = dmt.tower_0(bags)
                                     tower_1 = dmt.tower_1(bags)
                                     columns = dmt.columns(tower_0, tower_1)
                                     output_0 = dmt.output_0(columns[0])
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from dmt_compile.errors import PassError, at
from dmt_compile.graphs import closure, move_before
from dmt_compile.lookups import LookupSet
from dmt_compile.runtime.pooled import JoinColumns, MakeOutput
from dmt_compile.runtime.select import LocalBags, ReadIds, SelectIds
from dmt_compile.runtime.tables import TowerLookups
from dmt_compile.shapes import SHAPE, STORAGE, WRITES
from dmt_compile.stage import Stage

from .base import Draft, GraphPass


def ids_do_not_depend_on_lookups_of_their_round(stage: Stage) -> None:
    """All ids of a round must be known before its first lookup: one exchange of ids serves them all."""
    lookups = stage.lookups
    place = {source.round: number for number, source in enumerate(sorted(lookups.sources, key=lambda source: source.round))}
    made_in = {lookups.outputs[x.output].node: place[lookups.sources[x.source].round] for x in lookups.lookups}
    read_in = {name: place[source.round] for source in lookups.sources for name in source.nodes}
    after: dict[fx.Node, int] = {}
    for node in stage.graph.nodes:
        depends = max((after[used] for used in node.all_input_nodes if used in after), default=-1)
        if depends >= read_in.get(node.name, depends + 1):
            raise PassError(
                f"{at(node)} computes ids from the result of another lookup of the same round of exchanges: all ids of a round "
                "must be known before its first lookup"
            )
        known = max(depends, made_in.get(node.name, -1))
        if known >= 0:
            after[node] = known


def no_flat_lookup_left(stage: Stage) -> None:
    """No node still reads a whole lookup collection."""
    calls = {output.node for output in stage.lookups.outputs}
    for node in stage.graph.nodes:
        if node.name in calls:
            raise PassError(f"pass 'split-towers': {at(node)} still reads every table on every rank")


@dataclass(frozen=True)
class SplitTowers(GraphPass):
    name: ClassVar[str] = "split-towers"
    takes: ClassVar[tuple[str, ...]] = ("flat", "model")
    makes: ClassVar[str] = "towers"
    requires = (ids_do_not_depend_on_lookups_of_their_round,)
    ensures = (no_flat_lookup_left,)

    def rewrite(self, draft: Draft) -> None:
        made: dict[str, fx.Node] = {}
        for number, lookups in enumerate(draft.stage.lookups.rounds):
            made.update(_split(draft, number, lookups, made))


def _split(draft: Draft, number: int, lookups: LookupSet, made_before: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
    """Replace the lookups of one round; the nodes that stand for them, by the name that each lookup's call had."""
    plan = draft.stage.plan
    nodes = {node.name: node for node in draft.graph.nodes} | dict(made_before)
    calls = [nodes[output.node] for output in lookups.outputs]
    sources = [[nodes[name] for name in source.nodes] for source in lookups.sources]
    inner = [[nodes[name] for name in output.inner] for output in lookups.outputs]
    place = {node: index for index, node in enumerate(draft.graph.nodes)}
    first = min((node for call, own in zip(calls, inner, strict=True) for node in (call, *own)), key=lambda node: place[node])
    for lookup in lookups.lookups:
        own = [*inner[lookup.output], calls[lookup.output]]
        for node in sources[lookup.source]:
            _refuse_writes(draft.graph, place, first, node, next((user for user in own if node in user.all_input_nodes), own[-1]))
    move_before(draft.graph, first, [node for group in sources for node in group])

    entry_of = lookups.bag_of
    weighted = sorted({entry_of[x.source, x.feature] for x in lookups.lookups if x.weighted})
    with draft.placing(before=first, like=first, step="lookup", round=number):
        ids = [
            draft.call(f"ids_{i}", ReadIds(s), *group) for i, (s, group) in enumerate(zip(lookups.sources, sources, strict=True))
        ]
        bags = draft.call("bags", LocalBags(SelectIds(list(entry_of), weighted, (), lookups.sources), number), *ids)
        towers = []
        for index, tower in enumerate(plan.towers):
            served = [lookups.lookup[name] for name in tower.features if name in lookups.lookup]
            bag_of = [entry_of[x.source, x.feature] for x in served]
            module = TowerLookups(draft.stage.root, index, served, lookups.table, bag_of)
            towers.append(draft.call(f"tower_{index}", module, bags))
        arrival = [name for tower in plan.towers for name in tower.features if name in lookups.lookup]
        columns = draft.call("columns", JoinColumns(lookups, arrival), *towers)
    result = {}
    for index, (output, call) in enumerate(zip(lookups.outputs, calls, strict=True)):
        with draft.placing(before=first, like=call, step="lookup", round=number):
            part = draft.function(f"columns_{index}", operator.getitem, columns, index)
            shaped = [nodes[output.like]] if output.like is not None else []
            if lookups.uneven:
                shaped = [*(shaped or [None]), ids[lookups.source_of(output)]]
            made = draft.call(f"output_{index}", MakeOutput(output, lookups), part, *shaped)
        call.replace_all_uses_with(made)
        result[output.node] = made
        if SHAPE in call.meta:
            made.meta[SHAPE] = call.meta[SHAPE]
    replaced = {*calls, *(node for own in inner for node in own)}
    for call in reversed([node for node in draft.graph.nodes if node in replaced]):
        weights = [used for used in call.all_input_nodes if used.op == "get_attr"]
        draft.erase(call)
        for weight in weights:
            if not weight.users:
                draft.erase(weight)
    return result


def _refuse_writes(graph: fx.Graph, place: Mapping[fx.Node, int], first: fx.Node, source: fx.Node, reader: fx.Node) -> None:
    """Ids are read before the round's first lookup: nothing may write to them between there and where the model reads them."""
    writers = [node for node in graph.nodes if WRITES in node.meta and place[first] < place.get(node, -1) < place[reader]]
    if not writers:
        return
    needed = closure([source])
    for writer in writers:
        written: frozenset[int] = writer.meta[WRITES]
        moved = [node for node in needed if place.get(node, -1) > place[writer] or node is writer]
        read = {source, *(used for node in moved for used in node.all_input_nodes)}
        if any(node.meta.get(STORAGE) in written for node in read):
            raise PassError(
                f"{at(writer)} writes to what the lookup of {at(reader)} reads after another lookup: all ids are read before the "
                "first lookup, so compute them without writing in place there (y = x + 1, not x += 1), or before it"
            )
