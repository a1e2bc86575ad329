"""sptt -> modules: each tower's module between the shuffle and the peer exchange, so that only what it makes crosses (section 3.2).

shuffled = dmt.shuffle(tower)                     shuffled = dmt.shuffle(tower)
received = dmt.exchange_peer(shuffled)            vectors  = dmt.tower_vectors(shuffled)                # step f
columns  = dmt.restore(received)                  made     = dmt.tower_module(vectors)
output_0 = dmt.output_0(columns[0])         ==>   sent     = dmt.tower_send(made, shuffled)
vectors_0 = dmt.vectors_0(output_0, ...)          received = dmt.exchange_peer(sent)                    # step g
module_0  = dmt_towers.0(vectors_0)               tower_columns_0 = dmt.tower_columns_0(received)
tower_columns_0 = dmt.tower_columns_0(module_0)

Columns that something else in the model reads too travel beside, all those of the same lookup call; the others do not.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from dmt_compile.errors import PassError, at
from dmt_compile.runtime.pooled import ExchangeRows, MakeOutput, RestoreColumns
from dmt_compile.runtime.tower_rows import PickVectors, ReplacedOutput, RunTower, SendColumns, TowerColumns
from dmt_compile.runtime.vectors import ReplaceColumns, TakeVectors
from dmt_compile.stage import PASS, STEP, Stage
from dmt_compile.towers.record import HOLDER
from dmt_compile.verify.layout import check_layout

from .base import Draft, GraphPass


def towers_share_no_parameters(stage: Stage) -> None:
    """A tower's parameters are on its own ranks only, so nothing else of the model may use them."""
    used_by: dict[int, str] = {}
    for name, parameter in stage.root.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        user = f"tower {parts[1]}" if parts[0] == HOLDER else "the rest of the model"
        other = used_by.setdefault(id(parameter), user)
        if other != user:
            raise PassError(
                f"parameter '{name}' belongs to {other} and to {user}, but a tower's module runs on the tower's own ranks only: "
                "give each tower a module with parameters of its own (a function that makes one, not a list that repeats one)"
            )


def vectors_come_from_lookups(stage: Stage) -> None:
    """What a tower's module is given are values of lookups, all of the first round of exchanges."""
    first = {lookup.name for lookup in stage.lookups.rounds[0].lookups}
    for node in stage.graph.nodes:
        if node.op != "call_module" or not isinstance(module := stage.module(node), TakeVectors):
            continue
        late = next((name for name in module.names if name not in first), None)
        if late is not None:
            raise PassError(
                f"{at(node)} takes '{late}', whose rows arrive in a later round of exchanges: leave it out of the towers"
            )
        for used in node.all_input_nodes:
            if used.op != "call_module" or not isinstance(stage.module(used), MakeOutput):
                raise PassError(f"{at(node)} takes '{used.name}', which is not the value of a lookup")


@dataclass(frozen=True)
class TowerModules(GraphPass):
    name: ClassVar[str] = "tower-modules"
    takes: ClassVar[tuple[str, ...]] = ("sptt",)
    makes: ClassVar[str] = "modules"
    requires = (towers_share_no_parameters, vectors_come_from_lookups)
    ensures = (check_layout,)

    def applies(self, stage: Stage) -> bool:
        return bool(stage.vectors)

    def rewrite(self, draft: Draft) -> None:
        (exchange,) = [node for node in draft.calls(ExchangeRows) if _is_first_peer_exchange(draft, node)]
        (restore,) = exchange.users
        _drop_columns_that_towers_replace(draft)
        arrived, taken = _modules_behind_the_exchange(draft)
        raw = _still_needed(draft, restore, taken)
        _move(draft, exchange, restore, raw)
        for record in draft.stage.vectors:
            _from_the_exchange(draft, arrived[record.tower], exchange, restore, record.tower)
        for node in reversed(taken):
            draft.erase(node)
        _drop_outputs(draft, restore, raw)


def _is_first_peer_exchange(draft: Draft, node: fx.Node) -> bool:
    module = draft.module(node)
    return isinstance(module, ExchangeRows) and module.exchange.axis == "peer" and module.exchange.round == 0


def _mark(node: fx.Node, step: str) -> None:
    node.meta = {**node.meta, PASS: TowerModules.name, STEP: step}


def _key(node: fx.Node) -> str:
    """The name, among the modules of passes, of the one that a node calls."""
    return str(node.target).partition(".")[2]


def _drop_columns_that_towers_replace(draft: Draft) -> None:
    """A lookup's value of which towers bring back every column is made of these alone."""
    taken = {name for one in draft.stage.vectors for name in one.lookups}
    for node in draft.calls(ReplaceColumns):
        module = draft.module(node)
        assert isinstance(module, ReplaceColumns)
        if not set(module.output.lookups) <= taken:
            continue
        value, *wide = node.args
        assert isinstance(value, fx.Node)
        make = draft.module(value)
        assert isinstance(make, MakeOutput)
        places = [(number - 1, start, width) for number, start, width in module.places]
        node.args = (*wide, *value.args[1:])
        draft.extras[_key(node)] = ReplacedOutput(places, make)
        _mark(node, "g")


def _modules_behind_the_exchange(draft: Draft) -> tuple[dict[int, fx.Node], list[fx.Node]]:
    """The nodes that hold what each tower's module has made, by tower; and those that lead there from the lookups' values."""
    arrived: dict[int, fx.Node] = {}
    leading: list[fx.Node] = []
    by_lookups = {one.lookups: one.tower for one in draft.stage.vectors}
    for node in draft.calls(TakeVectors):
        taking = draft.module(node)
        assert isinstance(taking, TakeVectors)
        (module,) = node.users
        (columns,) = module.users
        arrived[by_lookups[taking.names]] = columns
        leading += [node, module]
    return arrived, leading


def _still_needed(draft: Draft, restore: fx.Node, taken: list[fx.Node]) -> Mapping[int, fx.Node]:
    """By number, the outputs of the first round that something else than the towers' modules reads."""
    found = {}
    for columns in restore.users:
        number: Any = columns.args[1]
        if columns.target is operator.getitem and any(user not in taken for made in columns.users for user in made.users):
            found[number] = columns
    return found


def _move(draft: Draft, exchange: fx.Node, restore: fx.Node, raw: Mapping[int, fx.Node]) -> None:
    stage = draft.stage
    records, grid, lookups = stage.vectors, stage.plan.grid, stage.lookups.rounds[0]
    old, restoring = draft.module(exchange), draft.module(restore)
    assert isinstance(old, ExchangeRows) and isinstance(restoring, RestoreColumns)
    arrival = restoring.arrival
    names = [name for number in raw for name in lookups.outputs[number].lookups]
    send = SendColumns(records, grid, lookups, arrival, names, lookups.exchange_dtype)
    shuffled, sizes = exchange.args
    with draft.placing(before=exchange, like=exchange, step="f"):
        vectors = draft.call("tower_vectors", PickVectors(records, grid, lookups, arrival), shuffled)
        made = draft.call("tower_module", RunTower(records, grid), vectors)
        sent = draft.call("tower_send", send, made, shuffled)
    exchange.args = (sent, sizes)
    draft.extras[_key(exchange)] = ExchangeRows(replace(old.exchange, tower_widths=send.widths))
    _mark(exchange, "g")
    if raw:
        beside = [send.raw_of(tower) for tower in range(grid.towers)]
        draft.extras[_key(restore)] = RestoreColumns(lookups, beside, first=send.made, outputs=sorted(raw))
        restore.meta = {**restore.meta, PASS: TowerModules.name}


def _from_the_exchange(draft: Draft, node: fx.Node, exchange: fx.Node, restore: fx.Node, tower: int) -> None:
    record = next(one for one in draft.stage.vectors if one.tower == tower)
    dtype = draft.stage.lookups.lookup[record.lookups[0]].dtype
    draft.extras[_key(node)] = TowerColumns(tower, record.columns, dtype)
    node.args = (exchange,)
    restore.prepend(node)
    _mark(node, "g")


def _drop_outputs(draft: Draft, restore: fx.Node, raw: Mapping[int, fx.Node]) -> None:
    for columns in list(restore.users):
        if columns.args[1] not in raw:
            for made in list(columns.users):
                draft.erase(made)
            draft.erase(columns)
    if not raw:
        draft.erase(restore)
