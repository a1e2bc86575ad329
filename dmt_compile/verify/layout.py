"""Follow rows and columns through a stage's graph, on every rank, for any batch sizes.

Every value that carries pooled embeddings is given the layout that the operations before it really produce: which ranks'
samples its rows are, which ranks' tables its columns come from. An exchange may only take what its record says it takes, and
the columns that reach the user's layers must be exactly the rank's own samples with every column once. Sizes never enter, so
one check holds for equal, unequal and empty batches.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from ..errors import VerificationError, at
from ..exchange import Block, Exchange
from ..lookups import LookupSet
from ..plan import TowerPlan
from ..runtime.pooled import ExchangeRows, MakeOutput, Pack, PeerPermute, RestoreColumns, Shuffle, Splits, Unpack
from ..runtime.tables import RankLookups
from ..runtime.tower_rows import RunTower, SendColumns, TowerColumns
from ..stage import ALL_TO_ALL, PASS, WAIT, Stage
from . import id_layout, tower_layout
from .values import Blocks, Buffer, Columns, FromTower, Ids, InFlight, Packed, Routed, Rows, Sizes, TowerRows


def check_layout(stage: Stage) -> None:
    """Check a stage with exchanges; the towers stage has none and needs none.

    Raises:
        VerificationError: a row or column would end up in the wrong place; names the pass and the node.
    """
    _Checker(stage).run()


class _Checker:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.rounds: tuple[LookupSet, ...] = stage.lookups.rounds
        self.plan: TowerPlan = stage.plan
        self.world = stage.plan.topology.world_size
        self.values: dict[fx.Node, Any] = {}
        self.node: fx.Node = next(iter(stage.graph.nodes))
        # By round.
        self.owned: dict[int, tuple[tuple[str, ...], ...]] = {}
        self.widths: dict[int, tuple[int, ...]] = {}
        self.restored: set[int] = set()
        self.outputs: list[tuple[int, int]] = []
        # Where towers' modules run among the exchanges.
        calls = [node for node in stage.graph.nodes if node.op == "call_module"]
        self.moved = any(isinstance(stage.module(node), RunTower | SendColumns | TowerColumns) for node in calls)
        self.arrived: set[int] = set()
        self.replaced: set[str] = set()

    def fail(self, message: str) -> None:
        made_by = self.node.meta.get(PASS, "capture")
        raise VerificationError(f"pass '{made_by}', stage '{self.stage.name}': {at(self.node)}: {message}")

    def expect(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    def run(self) -> None:
        for node in self.stage.graph.nodes:
            self.node = node
            self.values[node] = self.visit(node)
        wanted = [(number, index) for number, one in enumerate(self.rounds) for index in range(len(one.outputs))]
        if self.moved:
            wanted = tower_layout.finish(self, wanted)
        every = {number for number, _ in wanted}
        self.expect(self.restored == every, "no node puts the exchanged columns back in declaration order")
        self.expect(sorted(self.outputs) == wanted, f"outputs {self.outputs} of the lookups are made, {wanted} are needed")

    def visit(self, node: fx.Node) -> Any:
        if node.target is ALL_TO_ALL:
            payload, out_splits, in_splits = (self.value(arg) for arg in node.args[:3])
            return self.all_to_all(payload, out_splits, in_splits, node.args[3])
        if node.target is WAIT:
            value = self.value(node.args[0])
            self.expect(isinstance(value, InFlight), "waits for something that is not a collective")
            return value.arrived
        if node.target is getattr:
            return self.attribute(self.value(node.args[0]), str(node.args[1]))
        if node.target is operator.getitem:
            columns = self.value(node.args[0])
            if isinstance(columns, Columns) and columns.output is None:
                return Columns(columns.round, node.args[1])  # type: ignore[arg-type]
        if node.op == "call_module":
            handler = _HANDLERS.get(type(self.stage.module(node)))
            if handler is not None:
                return handler(self, self.stage.module(node), *[self.value(arg) for arg in node.args])
        expanded = tower_layout.expansion(self, node)
        if expanded is not None:
            return expanded
        for used in node.all_input_nodes:
            value = self.values[used]
            if isinstance(value, InFlight):
                self.fail(f"uses '{used.name}' before anything waits for it")
            if isinstance(value, Rows | TowerRows | Packed | Buffer | Blocks | Columns):
                self.fail(f"uses '{used.name}', whose rows have not been put back in the flat model's order yet")
            if isinstance(value, FromTower):
                self.fail(f"uses '{used.name}', which tower {value.tower} has made and nothing has laid out as the model has it")
        return None

    def value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    def flat_name(self, node: fx.Node) -> str:
        """The name, in the flat model's graph, of what a node stands for."""
        module = self.stage.module(node) if node.op == "call_module" else None
        return module.output.node if isinstance(module, MakeOutput) else node.name

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, Ids) and value.kind == "request":
            return Ids("unpacked lengths" if name == "lengths" else name, value.select, value.module)
        if isinstance(value, Routed) and name == "batch_sizes":
            return Sizes("batch", value.module.round)
        if isinstance(value, Sizes) and value.kind == "ids":
            return Sizes("batch", value.source.round) if name == "batch_sizes" else Sizes(name)
        return None

    # pooled rows

    def lookup(self, module: RankLookups, routed: Any) -> Any:
        self.expect(isinstance(routed, Routed), "looks up ids that were not sent to the tables' owners")
        number = routed.module.round
        lookups = self.rounds[number]
        self.expect(
            len(module.lookups) == self.world,
            f"names the lookups of {len(module.lookups)} ranks, there are {self.world}",
        )
        self.expect(module.tables == lookups.table, "reads other tables than the model's")
        self.expect(
            module.dtype == lookups.exchange_dtype,
            f"makes rows of {module.dtype}, the lookups need {lookups.exchange_dtype}",
        )
        readers = Counter(x.name for served in module.lookups for x in served)
        owner: dict[str, int] = {}
        for rank, served in enumerate(module.lookups):
            for lookup, bag in zip(served, module.bag_of[rank], strict=True):
                if owner.setdefault(lookup.table, rank) != rank:
                    self.fail(f"table '{lookup.table}' is owned twice: by rank {owner[lookup.table]} and by rank {rank}")
                self.expect(readers[lookup.name] == 1, f"feature '{lookup.name}' is looked up {readers[lookup.name]} times")
                self.expect(lookups.lookup.get(lookup.name) == lookup, f"'{lookup.name}' is not a lookup of the model")
                self.expect(
                    lookup.table in self.plan.tables_of_rank[rank],
                    f"rank {rank} reads table '{lookup.table}', which the plan does not give it",
                )
                start = routed.module.starts[rank]
                self.expect(
                    bag < routed.module.features_per_rank[rank],
                    f"rank {rank} looks up '{lookup.name}' in ids it is not sent",
                )
                entry = routed.select.entries[start + bag]
                self.expect(
                    entry == (lookup.source, lookup.feature),
                    f"rank {rank} looks up '{lookup.name}' with the ids of '{entry[1]}'",
                )
                self.expect(
                    not lookup.weighted or bag in routed.module.weighted_per_rank[rank],
                    f"rank {rank} is not sent the weights of '{lookup.feature}'",
                )
        for lookup in lookups.lookups:
            if lookup.name not in readers:
                self.fail(f"feature '{lookup.name}' is looked up by nobody: table '{lookup.table}' has no owner")
        self.owned[number] = tuple(tuple(x.name for x in served) for served in module.lookups)
        self.widths[number] = tuple(sum(x.dim for x in served) for served in module.lookups)
        world = range(self.world)
        return Rows(lambda rank: Block(world, (rank,)), number)

    def permute(self, module: PeerPermute, rows: Any, sizes: Any) -> Any:
        self.expect(isinstance(rows, Rows), "permutes something that is not pooled rows")
        self.batch_sizes(sizes, rows.round)
        self.expect(sorted(module.order) == list(range(self.world)), f"its order is not a permutation of the {self.world} ranks")
        for rank in range(self.world):
            self.expect(_natural(rows.layout(rank).rows, self.world), "permutes rows that are not in rank order")
        return Rows(lambda rank: Block(module.order, rows.layout(rank).owners), rows.round, rows.sent)

    def declared(self, module: ExchangeRows, rows: Any, sizes: Any) -> Any:
        self.batch_sizes(sizes, module.exchange.round)
        self.takes(module.exchange, rows)
        return Blocks(module.exchange, rows.sent)

    def pack(self, module: Pack, rows: Any) -> Any:
        if isinstance(rows, Ids):
            return replace(rows, kind=rows.kind.removeprefix("unpacked "))
        self.expect(isinstance(rows, Rows), "packs something that is not pooled rows")
        return Packed(rows)

    def takes(self, exchange: Exchange, rows: Any) -> None:
        """The rows' real layout on every rank is the one the exchange is made for, cut into the runs of its members."""
        self.expect(isinstance(rows, Rows), "exchanges something that is not pooled rows")
        self.expect(exchange.grid == self.plan.grid, f"the exchange is made for {exchange.grid}, the plan has {self.plan.grid}")
        self.expect(exchange.round == rows.round, f"the exchange is of round {exchange.round}, the rows are of round {rows.round}")
        self.expect(
            exchange.widths == self.widths[rows.round], "the exchange expects other numbers of columns than the tables make"
        )
        self.expect(
            exchange.tower_widths == (None if rows.sent is None else rows.sent.widths),
            "the exchange expects other numbers of columns than the towers send",
        )
        self.expect(rows.sent is None or exchange.axis == "peer", "what towers' modules have made is not sent to peers")
        checked: set[Any] = set()
        cut: dict[Any, Sequence[int]] = {}
        for rank in range(self.world):
            layout, source = rows.layout(rank), exchange.source(rank)
            if not layout.same_as(source):
                self.fail(f"on rank {rank} the {exchange.axis} exchange takes {source}, but is given {layout}")
            members = exchange.members(rank)
            if members not in checked:
                checked.add(members)
                runs = tuple(exchange.rows_to(member) for member in members)
                # All towers cut the same rows into the same runs: written out for each, they would be the ranks squared.
                if cut.get(runs) is not source.rows:
                    self.expect(
                        [row for run in runs for row in run] == list(source.rows),
                        f"on rank {rank} the rows sent to the members of the {exchange.axis} group are not its rows",
                    )
                    cut[runs] = source.rows

    def splits(self, module: Splits, sizes: Any) -> Any:
        self.batch_sizes(sizes, module.exchange.round)
        return Sizes(f"rows_{module.direction}", module.exchange)

    def all_to_all(self, payload: Any, out_splits: Any, in_splits: Any, axis: Any) -> Any:
        if isinstance(payload, Ids):
            return self.exchange_ids(payload, out_splits, in_splits, axis)
        self.expect(isinstance(payload, Packed), "sends something that is neither ids nor packed rows")
        for value, direction in ((in_splits, "in"), (out_splits, "out")):
            self.expect(
                isinstance(value, Sizes) and value.kind == f"rows_{direction}",
                f"its {direction}put splits are not the sizes of what it {'sends' if direction == 'in' else 'receives'}",
            )
        exchange = in_splits.source
        self.expect(exchange == out_splits.source, "its input and output splits belong to different exchanges")
        self.expect(axis == exchange.axis, f"runs in the {axis} group, its sizes are those of the {exchange.axis} group")
        self.takes(exchange, payload.rows)
        return InFlight(Buffer(exchange, payload.rows.sent))

    def exchange_ids(self, payload: Ids, out_splits: Any, in_splits: Any, axis: Any) -> Any:
        self.expect(axis == "world", f"sends ids in the {axis} group: owners may be any rank of the world")
        if payload.kind == "counts":
            three = [3] * self.world
            given = [list(splits) if isinstance(splits, list | tuple) else splits for splits in (out_splits, in_splits)]
            self.expect(given == [three, three], "three numbers go to and come from every rank")
        else:
            for value, direction in ((in_splits, "in"), (out_splits, "out")):
                self.expect(
                    isinstance(value, Sizes) and value.kind == f"{payload.kind}_{direction}",
                    f"its {direction}put splits are not the sizes of the {payload.kind} "
                    f"it {'sends' if direction == 'in' else 'receives'}",
                )
        return InFlight(Ids(f"{payload.kind} received", payload.select, payload.module))

    def unpack(self, module: Unpack, buffer: Any, sizes: Any) -> Any:
        self.awaited(buffer)
        self.batch_sizes(sizes, module.exchange.round)
        self.expect(isinstance(buffer, Buffer), "unpacks something that was not received")
        self.expect(
            buffer.exchange == module.exchange,
            f"unpacks a {buffer.exchange.axis} exchange as a {module.exchange.axis} exchange",
        )
        return Blocks(module.exchange, buffer.sent)

    def shuffle(self, module: Shuffle, blocks: Any) -> Any:
        self.expect(isinstance(blocks, Blocks), "shuffles something that is not the blocks of an exchange")
        self.expect(blocks.sent is None, "shuffles what towers' modules have made")
        exchange = blocks.exchange

        def layout(rank: int) -> Block:
            owners = [owner for member in exchange.members(rank) for owner in exchange.owners(member)]
            return Block(exchange.rows_to(rank), tuple(owners))

        return Rows(layout, exchange.round)

    def restore(self, module: RestoreColumns, blocks: Any) -> Any:
        self.expect(isinstance(blocks, Blocks), "is not given the blocks of an exchange")
        exchange = blocks.exchange
        lookups, owned = self.rounds[exchange.round], self.owned[exchange.round]
        checked: set[Any] = set()
        for rank in range(self.world):
            rows = exchange.rows_to(rank)
            self.expect(tuple(rows) == (rank,), f"rank {rank} gets the samples of ranks {list(rows)[:8]}, it needs its own")
            members = exchange.members(rank)
            if members in checked or blocks.sent is not None:
                continue
            checked.add(members)
            arriving = [[name for owner in exchange.owners(member) for name in owned[owner]] for member in members]
            self.expect(
                [list(block) for block in module.arrival] == arriving,
                f"the columns that reach rank {rank} are not the ones it sorts",
            )
        if blocks.sent is not None:
            tower_layout.restored(self, module, blocks)
            self.restored.add(exchange.round)
            return Columns(exchange.round)
        self.expect(not any(module.first), "does not begin at the first column")
        names = Counter(name for block in module.arrival for name in block)
        wanted = Counter(lookup.name for lookup in lookups.lookups)
        missing = next(iter(wanted - names), None) or next(iter(names - wanted), None)
        self.expect(missing is None, f"the columns of '{missing}' do not arrive exactly once")
        sorted_by_arrival = RestoreColumns(lookups, module.arrival)._outputs
        self.expect(module._outputs == sorted_by_arrival, "does not sort the columns into declaration order")
        self.restored.add(exchange.round)
        return Columns(exchange.round)

    def make_output(self, module: MakeOutput, columns: Any, like: Any = None, ids: Any = None) -> Any:
        self.expect(isinstance(columns, Columns) and columns.output is not None, "is not given the columns of one output")
        lookups = self.rounds[columns.round]
        expected = lookups.outputs[columns.output]
        self.expect(module.output == expected, f"makes the output of '{module.output.node}' from the columns of '{expected.node}'")
        dims = [lookups.lookup[name].dim for name in expected.lookups]
        self.expect(module._dims == dims, f"offers columns of widths {module._dims[:8]}, the lookups make {dims[:8]}")
        shaped = [self.flat_name(arg) for arg in self.node.args[1:2] if isinstance(arg, fx.Node)]
        self.expect(shaped == ([expected.like] if expected.like else []), f"takes the shape of {shaped}, not of {expected.like}")
        source = lookups.sources[lookups.source_of(expected)]
        own = ids.module if isinstance(ids, Ids) and ids.kind == "source" else ids
        kept = own == (source if lookups.uneven else None)
        self.expect(kept, f"does not keep as many rows as '{expected.node}' has {source.unit}s of its own")
        if expected.shape is not None:
            fixed = math.prod(size for size in expected.shape if size != -1)
            self.expect(
                expected.shape.count(-1) == 1 and fixed > 0 and sum(dims) % fixed == 0,
                f"gives {sum(dims)} columns the shape {expected.shape}, which does not hold them",
            )
        elif expected.like is None:
            self.expect(len(expected.keys) == len(dims), f"offers {len(dims)} lookups under {len(expected.keys)} keys")
        self.outputs.append((columns.round, columns.output))
        return None

    def batch_sizes(self, sizes: Any, number: int) -> None:
        self.expect(isinstance(sizes, Sizes) and sizes.kind == "batch", "is not given the batch sizes of all ranks")
        self.expect(sizes.source == number, f"is given the sizes of round {sizes.source}, its rows are of round {number}")

    def awaited(self, value: Any) -> None:
        self.expect(not isinstance(value, InFlight), "uses the result of a collective before anything waits for it")


def _natural(rows: Any, world: int) -> bool:
    return rows == range(world) or tuple(rows) == tuple(range(world))


_HANDLERS: dict[type[nn.Module], Callable[..., Any]] = {
    RankLookups: _Checker.lookup,
    PeerPermute: _Checker.permute,
    ExchangeRows: _Checker.declared,
    Pack: _Checker.pack,
    Splits: _Checker.splits,
    Unpack: _Checker.unpack,
    Shuffle: _Checker.shuffle,
    RestoreColumns: _Checker.restore,
    MakeOutput: _Checker.make_output,
    **id_layout.HANDLERS,
    **tower_layout.HANDLERS,
}
