"""Ways to spoil a stage in which towers' modules run before the peer exchange, by name. Each gets a copy of the stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from mutants import Mutant, no_shuffle
from torch import nn

from dmt_compile.exchange import Exchange
from dmt_compile.runtime.pooled import ExchangeRows, RestoreColumns
from dmt_compile.runtime.tower_rows import PickVectors, RunTower, SendColumns, TowerColumns


def _records(m: Mutant, change: Callable[[list[Any]], list[Any]]) -> tuple[Any, ...]:
    return tuple(change(list(m.stage.vectors)))


def _run_as(m: Mutant, other: Callable[[int], int]) -> None:
    """Each rank runs the module of the tower of another rank."""

    class Another(RunTower):
        def bind(self, context: Any) -> nn.Module:
            return RunTower(self.records, self.grid).bind(dataclasses.replace(context, rank=other(context.rank)))

    m.swap_module("tower_module", lambda old: Another(old.records, old.grid))


def module_of_another_tower(m: Mutant) -> None:
    _run_as(m, lambda rank: (rank + m.grid.ranks_per_tower) % m.world)


def one_module_for_all(m: Mutant) -> None:
    _run_as(m, lambda rank: 0)


def no_module_in_the_first_tower(m: Mutant) -> None:
    m.swap_module("tower_module", lambda old: RunTower(old.records[1:], old.grid))


def no_module(m: Mutant) -> None:
    m.skip("tower_module")


def module_twice(m: Mutant) -> None:
    node = m.nodes["tower_module"]
    with m.graph.inserting_after(node):
        again = m.graph.call_module("dmt.tower_module", node.args)
    node.replace_all_uses_with(again)
    again.args = (node,)


def features_in_another_order(m: Mutant) -> None:
    def turned(records: list[Any]) -> list[Any]:
        return [dataclasses.replace(one, lookups=one.lookups[::-1]) for one in records]

    m.swap_module("tower_vectors", lambda old: PickVectors(_records(m, turned), old.grid, old.lookups, old.arrival))


def columns_of_other_features(m: Mutant) -> None:
    def make(old: PickVectors) -> PickVectors:
        return PickVectors(old.records, old.grid, old.lookups, [names[::-1] for names in old.arrival])

    m.swap_module("tower_vectors", make)


def before_the_shuffle(m: Mutant) -> None:
    m.skip("shuffle")


def before_the_tower_exchange(m: Mutant) -> None:
    m.set_args("tower_vectors", _0=m.nodes["permute"])


def _widths(m: Mutant, change: Callable[[Exchange], Exchange]) -> None:
    if "exchange_peer" in m.extras:
        m.swap_module("exchange_peer", lambda old: ExchangeRows(change(old.exchange)))
        return
    for name in ("peer_in_splits", "peer_out_splits", "peer_unpack"):
        spoilt = m.extras[name]
        m.extras[name] = type(spoilt)(change(spoilt.exchange), *([spoilt.direction] if hasattr(spoilt, "direction") else []))


def widths_of_the_tables(m: Mutant) -> None:
    _widths(m, lambda exchange: dataclasses.replace(exchange, tower_widths=None))


def widths_of_other_towers(m: Mutant) -> None:
    def turned(exchange: Exchange) -> Exchange:
        assert exchange.tower_widths is not None
        return dataclasses.replace(exchange, tower_widths=(*exchange.tower_widths[1:], exchange.tower_widths[0]))

    _widths(m, turned)


def columns_too_many(m: Mutant) -> None:
    m.swap_module("tower_columns_0", lambda old: TowerColumns(old.tower, old.columns - 1, old.dtype))


def towers_exchanged_on_arrival(m: Mutant) -> None:
    m.extras["tower_columns_0"], m.extras["tower_columns_1"] = m.extras["tower_columns_1"], m.extras["tower_columns_0"]


def one_tower_twice(m: Mutant) -> None:
    m.swap_module("tower_columns_1", lambda old: TowerColumns(0, m.stage.vectors[0].columns, old.dtype))


def towers_laid_out_in_another_order(m: Mutant) -> None:
    name = next(name for name in m.nodes if name.startswith(("laid_", "replaced_")))
    args = list(m.nodes[name].args)
    args[-2], args[-1] = args[-1], args[-2]
    m.nodes[name].args = tuple(args)


def _send(m: Mutant, **changed: Any) -> None:
    def make(old: SendColumns) -> SendColumns:
        fields = {"records": old.records, "arrival": old.arrival, "raw": old.raw, "dtype": old.dtype, **changed}
        return SendColumns(fields["records"], old.grid, old.lookups, fields["arrival"], fields["raw"], fields["dtype"])

    m.swap_module("tower_send", make)


def raw_columns_that_nobody_needs(m: Mutant) -> None:
    _send(m, raw=[name for names in m.extras["tower_send"].arrival for name in names])


def rounded_to_half(m: Mutant) -> None:
    _send(m, dtype=torch.float16)


def raw_columns_left_out(m: Mutant) -> None:
    _send(m, raw=sorted(m.extras["tower_send"].raw)[1:])


def raw_columns_of_others(m: Mutant) -> None:
    _send(m, arrival=[names[::-1] for names in m.extras["tower_send"].arrival])


def raw_columns_read_from_the_first(m: Mutant) -> None:
    m.swap_module("restore", lambda old: RestoreColumns(old.lookups, old.arrival, None, old.outputs))


def raw_columns_in_another_order(m: Mutant) -> None:
    m.swap_module(
        "restore", lambda old: RestoreColumns(old.lookups, [names[::-1] for names in old.arrival], old.first, old.outputs)
    )


EVERYWHERE: tuple[Callable[[Mutant], None], ...] = (
    module_of_another_tower, one_module_for_all, no_module_in_the_first_tower, no_module, module_twice, features_in_another_order,
    columns_of_other_features, no_shuffle, before_the_shuffle, before_the_tower_exchange, widths_of_the_tables,
    widths_of_other_towers, columns_too_many, towers_exchanged_on_arrival, one_tower_twice, towers_laid_out_in_another_order,
    raw_columns_that_nobody_needs, rounded_to_half,
)  # fmt: skip
BESIDE: tuple[Callable[[Mutant], None], ...] = (
    raw_columns_left_out, raw_columns_of_others, raw_columns_read_from_the_first, raw_columns_in_another_order,
)  # fmt: skip
"""For programs in which raw columns travel too."""
