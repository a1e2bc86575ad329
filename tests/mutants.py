"""Ways to spoil a lowered program, by name. Each gets a copy of the stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from dmt_compile import VerificationError
from dmt_compile.exchange import Exchange
from dmt_compile.lookups import LookupSet
from dmt_compile.passes.base import Draft
from dmt_compile.runtime.ids import CountIds, MakeRequest, ReadSizes, UnpackIds
from dmt_compile.runtime.pooled import PeerPermute, RestoreColumns, Splits, Unpack
from dmt_compile.runtime.select import SelectIds
from dmt_compile.runtime.tables import RankLookups
from dmt_compile.stage import Stage
from dmt_compile.topology import TowerGrid
from dmt_compile.verify.layout import check_layout

ROWS = 300


class Mutant(Draft):
    """A copy of a stage to be spoilt."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "mutant")
        self.nodes: dict[str, fx.Node] = {node.name: node for node in self.graph.nodes}
        self.grid: TowerGrid = stage.plan.grid
        self.lookups: LookupSet = stage.lookups
        self.world = stage.plan.topology.world_size

    def swap_module(self, name: str, make: Callable[[Any], nn.Module]) -> None:
        self.extras[name] = make(self.extras[name])

    def skip(self, name: str, argument: int = 0) -> None:
        """Let the users of a node have one of its arguments instead."""
        node = self.nodes[name]
        node.replace_all_uses_with(node.args[argument])  # type: ignore[arg-type]
        self.graph.erase_node(node)

    def set_args(self, name: str, **places: Any) -> None:
        node = self.nodes[name]
        args = list(node.args)
        for place, value in places.items():
            args[int(place[1:])] = value
        node.args = tuple(args)


def remade(stage: Stage, spoil: Callable[[Mutant], None]) -> Stage:
    mutant = Mutant(stage)
    spoil(mutant)
    return mutant.finish(stage.name)


def refuted_by_layout(stage: Stage) -> str:
    """The layout check's message, which names the pass, the node and the stage."""
    with pytest.raises(VerificationError) as caught:
        check_layout(stage)
    message = str(caught.value)
    assert "pass '" in message and "node '" in message and f"stage '{stage.name}'" in message, message
    return message


# What is wrong, one function each. The argument is a copy of the lowered stage.


def printed_peer_key(m: Mutant) -> None:
    per_host = m.stage.plan.topology.ranks_per_host
    m.swap_module("permute", lambda _: PeerPermute(sorted(range(m.world), key=lambda r: (r % m.grid.towers, r // per_host))))


def natural_order(m: Mutant) -> None:
    m.swap_module("permute", lambda _: PeerPermute(range(m.world)))


def no_permute(m: Mutant) -> None:
    m.skip("permute")


def permuted_twice(m: Mutant) -> None:
    with m.graph.inserting_after(m.nodes["permute"]):
        again = m.graph.call_module("dmt.permute", m.nodes["permute"].args)
    m.nodes["permute"].replace_all_uses_with(again)
    again.args = (m.nodes["permute"], m.nodes["permute"].args[1])


def not_a_permutation(m: Mutant) -> None:
    m.swap_module("permute", lambda old: PeerPermute((old.order[0], *old.order[:-1])))


def swapped_groups(m: Mutant) -> None:
    m.set_args("tower_all_to_all", _3="peer")
    m.set_args("peer_all_to_all", _3="tower")


def tower_step_among_peers(m: Mutant) -> None:
    m.set_args("tower_all_to_all", _3="peer")


def peer_step_in_the_world(m: Mutant) -> None:
    m.set_args("peer_all_to_all", _3="world")


def ids_among_peers(m: Mutant) -> None:
    m.set_args("values_all_to_all", _3="peer")


class Stacked(nn.Module):
    """The blocks of step d one under the other, cut into rows of the right width: (features, peers)."""

    def forward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        width = sum(block.shape[1] for block in blocks)
        return torch.cat([block.reshape(-1) for block in blocks]).view(-1, width)


def no_shuffle(m: Mutant) -> None:
    m.swap_module("shuffle", lambda _: Stacked())


def transposed_splits(m: Mutant) -> None:
    _, out, in_, _ = m.nodes["tower_all_to_all"].args
    m.set_args("tower_all_to_all", _1=in_, _2=out)


def transposed_id_splits(m: Mutant) -> None:
    _, out, in_, _ = m.nodes["values_all_to_all"].args
    m.set_args("values_all_to_all", _1=in_, _2=out)


def splits_of_the_other_exchange(m: Mutant) -> None:
    m.swap_module("peer_in_splits", lambda _: m.extras["tower_in_splits"])
    m.swap_module("peer_out_splits", lambda _: m.extras["tower_out_splits"])


def splits_of_lengths_for_values(m: Mutant) -> None:
    m.set_args("values_all_to_all", _1=m.nodes["lengths_out"], _2=m.nodes["lengths_in"])


def counts_to_two_only(m: Mutant) -> None:
    m.set_args("counts_all_to_all", _1=[3] * (m.world - 1), _2=[3] * (m.world - 1))


def _lookups(m: Mutant, change: Callable[[list[list[Any]], list[list[int]]], None]) -> None:
    def make(old: RankLookups) -> RankLookups:
        lookups, bags = [list(x) for x in old.lookups], [list(x) for x in old.bag_of]
        change(lookups, bags)
        return RankLookups(lookups, bags, old.tables, old.dtype)

    m.swap_module("lookup", make)


def owned_twice(m: Mutant) -> None:
    def change(lookups: list[list[Any]], bags: list[list[int]]) -> None:
        lookups[1].append(lookups[0][0])
        bags[1].append(0)

    _lookups(m, change)


def owned_by_nobody(m: Mutant) -> None:
    def change(lookups: list[list[Any]], bags: list[list[int]]) -> None:
        lookups[0].pop()
        bags[0].pop()

    _lookups(m, change)


def owners_exchanged(m: Mutant) -> None:
    def change(lookups: list[list[Any]], bags: list[list[int]]) -> None:
        lookups[0], lookups[1] = lookups[1], lookups[0]

    _lookups(m, change)


def bags_of_another_feature(m: Mutant) -> None:
    def change(lookups: list[list[Any]], bags: list[list[int]]) -> None:
        rank = next(r for r, run in enumerate(bags) if len(set(run)) > 1)
        bags[rank].reverse()

    _lookups(m, change)


def another_table_behind_a_name(m: Mutant) -> None:
    tables = dict(m.lookups.table)
    tables["a0"], tables["a1"] = tables["a1"], tables["a0"]
    m.swap_module("lookup", lambda old: RankLookups(old.lookups, old.bag_of, tables, old.dtype))


def rows_rounded_to_half(m: Mutant) -> None:
    m.swap_module("lookup", lambda old: RankLookups(old.lookups, old.bag_of, old.tables, torch.float16))


def _no_wait(name: str) -> Callable[[Mutant], None]:
    return lambda m: m.skip(name)


def waits_for_nothing(m: Mutant) -> None:
    m.set_args("tower_wait", _0=m.nodes["tower_pack"])


def _select(m: Mutant, change: Callable[[SelectIds, Any], tuple[SelectIds, Any]]) -> None:
    def make(old: MakeRequest) -> MakeRequest:
        select, exchange = change(old.select, old.exchange)
        return MakeRequest(select=select, exchange=exchange)

    m.swap_module("request", make)


def ids_to_the_wrong_rank(m: Mutant) -> None:
    """All ranks' requests for ranks 0 and 1 change places, sizes included."""

    def change(select: SelectIds, exchange: Any) -> tuple[SelectIds, Any]:
        shift = exchange.starts[1]
        entries = select.entries[shift:] + select.entries[:shift]
        return SelectIds(entries, select.weighted, ((0, ROWS),) * len(entries), select.sources), exchange

    _select(m, change)


def ids_from_the_other_input(m: Mutant) -> None:
    m.set_args("ids_0", _0=m.nodes["second"])
    m.set_args("ids_1", _0=m.nodes["first"])


def sources_exchanged(m: Mutant) -> None:
    first, second = m.nodes["request"].args
    m.set_args("request", _0=second, _1=first)


def _other_division(name: str, kind: type[nn.Module]) -> Callable[[Mutant], None]:
    def spoil(m: Mutant) -> None:
        def make(old: Any) -> nn.Module:
            counts = old.exchange.features_per_rank
            return kind(dataclasses.replace(old.exchange, features_per_rank=(*counts[1:], counts[0])))

        m.swap_module(name, make)

    return spoil


def weights_of_other_features(m: Mutant) -> None:
    def make(old: UnpackIds) -> UnpackIds:
        weighted = old.exchange.weighted_per_rank
        return UnpackIds(dataclasses.replace(old.exchange, weighted_per_rank=(*weighted[1:], weighted[0])))

    m.swap_module("unpack_ids", make)


def no_weights(m: Mutant) -> None:
    m.set_args("unpack_ids", _2=None)


def values_for_weights(m: Mutant) -> None:
    m.set_args("unpack_ids", _2=m.nodes["values_wait"])


def ids_in_eight_bits(m: Mutant) -> None:
    narrow: dict[str, Any] = {"id_dtype": torch.int8}
    for name in ("request", "counts", "sizes", "unpack_ids"):
        exchange = dataclasses.replace(m.extras[name].exchange, **narrow)  # type: ignore[type-var]
        if name == "request":
            m.swap_module(name, lambda old, exchange=exchange: MakeRequest(select=old.select, exchange=exchange))
        else:
            m.swap_module(name, lambda old, exchange=exchange: type(old)(exchange))


def sizes_of_what_was_received_only(m: Mutant) -> None:
    m.set_args("sizes", _1=m.nodes["counts_wait"])


def columns_in_arrival_order(m: Mutant) -> None:
    m.swap_module("restore", lambda old: RestoreColumns(m.lookups, old.arrival[1:] + old.arrival[:1]))


def two_columns_exchanged(m: Mutant) -> None:
    swap = {"a0": "x0", "a1": "x1"}

    def make(old: RestoreColumns) -> RestoreColumns:
        first, second = (m.lookups.lookups_of_table[name][0].name for name in swap)
        other = {first: second, second: first}
        return RestoreColumns(m.lookups, [[other.get(name, name) for name in block] for block in old.arrival])

    m.swap_module("restore", make)


def columns_sorted_otherwise_than_it_says(m: Mutant) -> None:
    def make(old: RestoreColumns) -> RestoreColumns:
        changed = RestoreColumns(m.lookups, old.arrival)
        changed._outputs = [list(reversed(runs)) for runs in old._outputs]
        return changed

    m.swap_module("restore", make)


def outputs_exchanged(m: Mutant) -> None:
    m.set_args("columns_0", _1=1)
    m.set_args("columns_1", _1=0)


def one_output_twice(m: Mutant) -> None:
    m.set_args("columns_1", _1=0)


def _constant_sizes(routed: Any) -> list[int]:
    return [2] * len(routed.batch_sizes)


def _guessed_sizes(name: str) -> Callable[[Mutant], None]:
    def spoil(m: Mutant) -> None:
        node = m.nodes[name]
        with m.placing(before=node, like=node, step=""):
            guess = m.function("guess", _constant_sizes, m.nodes["unpack_ids"])
        m.set_args(name, **{f"_{len(node.args) - 1}": guess})

    return spoil


def sizes_in_reverse(m: Mutant) -> None:
    node = m.nodes["tower_pack"]
    with m.placing(before=node, like=node, step=""):
        turned = m.function("turned", _reversed, m.nodes["batch_sizes"])
    for name in ("tower_unpack", "tower_in_splits", "tower_out_splits"):
        m.set_args(name, **{f"_{len(m.nodes[name].args) - 1}": turned})


def _reversed(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(reversed(sizes))


def _records(axis: str, change: Callable[[Exchange], Exchange]) -> Callable[[Mutant], None]:
    """Change the record of an exchange wherever it stands, consistently."""

    def spoil(m: Mutant) -> None:
        for name in (f"{axis}_in_splits", f"{axis}_out_splits"):
            m.swap_module(name, lambda old: Splits(change(old.exchange), old.direction))
        m.swap_module(f"{axis}_unpack", lambda old: Unpack(change(old.exchange)))

    return spoil


def _transposed(exchange: Exchange) -> Exchange:
    grid = exchange.grid
    return dataclasses.replace(exchange, grid=TowerGrid(grid.ranks_per_tower, grid.towers))


def _turned_widths(exchange: Exchange) -> Exchange:
    return dataclasses.replace(exchange, widths=(*exchange.widths[1:], exchange.widths[0]))


def unpacked_as_the_other_exchange(m: Mutant) -> None:
    m.swap_module("tower_unpack", lambda _: m.extras["peer_unpack"])


def not_packed(m: Mutant) -> None:
    m.skip("tower_pack")


def lengths_not_packed(m: Mutant) -> None:
    m.skip("lengths_pack")


def one_output_out_of_another(m: Mutant) -> None:
    m.set_args("columns_1", _0=m.nodes["columns_0"])


def values_sent_to_nobody_counted(m: Mutant) -> None:
    m.set_args("counts_all_to_all", _1=m.nodes["counts"], _2=m.nodes["counts"])


def no_peer_exchange(m: Mutant) -> None:
    m.nodes["peer_unpack"].replace_all_uses_with(m.nodes["tower_unpack"])
    m.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


MUTANTS: dict[str, Callable[[Mutant], None]] = {
    **{
        f.__name__: f
        for f in (
            natural_order, no_permute, permuted_twice, not_a_permutation, swapped_groups, tower_step_among_peers,
            peer_step_in_the_world, ids_among_peers, no_shuffle, transposed_splits, transposed_id_splits,
            splits_of_the_other_exchange, splits_of_lengths_for_values, counts_to_two_only, owned_twice, owned_by_nobody,
            owners_exchanged, bags_of_another_feature, another_table_behind_a_name, rows_rounded_to_half, waits_for_nothing,
            ids_to_the_wrong_rank, ids_from_the_other_input, sources_exchanged, weights_of_other_features, no_weights,
            values_for_weights, ids_in_eight_bits, sizes_of_what_was_received_only, columns_in_arrival_order,
            two_columns_exchanged, columns_sorted_otherwise_than_it_says, outputs_exchanged, one_output_twice,
            sizes_in_reverse, unpacked_as_the_other_exchange, not_packed, no_peer_exchange,
            lengths_not_packed, one_output_out_of_another, values_sent_to_nobody_counted,
        )
    },
    **{f"no {kind}_wait": _no_wait(f"{kind}_wait") for kind in ("counts", "lengths", "values", "weights", "tower", "peer")},
    **{f"guessed sizes for {n}": _guessed_sizes(n) for n in ("peer_in_splits", "peer_out_splits", "peer_unpack", "permute")},
    "counts by another division": _other_division("counts", CountIds),
    "sizes by another division": _other_division("sizes", ReadSizes),
    "ids unpacked by another division": _other_division("unpack_ids", UnpackIds),
    "tower grid transposed": _records("tower", _transposed),
    "peer grid transposed": _records("peer", _transposed),
    "tower widths of other ranks": _records("tower", _turned_widths),
    "peer widths of other ranks": _records("peer", _turned_widths),
}  # fmt: skip
