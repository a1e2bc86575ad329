"""Follow rows and columns through a stage's graph, on every rank, for any batch sizes.

Every value that carries pooled embeddings is given the layout that the operations before it really produce: which ranks'
samples its rows are, which ranks' tables its columns come from. An exchange may only take what its record says it takes, and
the columns that reach the user's layers must be exactly the rank's own samples with every column once. Sizes never enter, so
one check holds for equal, unequal and empty batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..errors import VerificationError, at
from ..exchange import Block, Exchange
from ..lookups import LookupSet
from ..plan import TowerPlan
from ..runtime.ids import CountIds, MakeRequest, ReadIds, ReadSizes, RouteIds, SelectIds, UnpackIds
from ..runtime.pooled import ExchangeRows, Pack, PeerPermute, RankLookups, RestoreColumns, Shuffle, Splits, Unpack
from ..stage import ALL_TO_ALL, PASS, WAIT, Stage


@dataclass(frozen=True)
class _Rows:
    """A 2-D tensor of pooled rows; ``layout(rank)`` is its block on a rank."""

    layout: Callable[[int], Block]


@dataclass(frozen=True)
class _Packed:
    """The buffer that an exchange sends."""

    exchange: Exchange


@dataclass(frozen=True)
class _InFlight:
    """The result of a collective that nobody has waited for; ``arrived`` is what it becomes then."""

    arrived: Any


@dataclass(frozen=True)
class _Buffer:
    """A received buffer of an exchange."""

    exchange: Exchange


@dataclass(frozen=True)
class _Blocks:
    """The received blocks of an exchange."""

    exchange: Exchange


@dataclass(frozen=True)
class _Ids:
    """Ids on their way: ``kind`` says which part, ``select`` what every rank asked for."""

    kind: str
    select: SelectIds
    module: Any


@dataclass(frozen=True)
class _Routed:
    """Bags of each rank's lookups, over the samples of all ranks."""

    select: SelectIds
    module: Any


@dataclass(frozen=True)
class _Sizes:
    """Numbers that follow from the batch sizes of all ranks; ``kind`` tells which."""

    kind: str
    source: Any = None


def check_layout(stage: Stage) -> None:
    """Check a stage with exchanges; the towers stage has none and needs none.

    Raises:
        VerificationError: a row or column would end up in the wrong place; names the pass and the node.
    """
    _Checker(stage).run()


class _Checker:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.lookups: LookupSet = stage.lookups
        self.plan: TowerPlan = stage.plan
        self.world = stage.plan.topology.world_size
        self.values: dict[fx.Node, Any] = {}
        self.node: fx.Node = next(iter(stage.graph.nodes))
        self.owned: tuple[tuple[str, ...], ...] = ()
        self.widths: tuple[int, ...] = ()
        self.restored = False

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
        self.expect(self.restored, "no node puts the exchanged columns back in declaration order")

    def visit(self, node: fx.Node) -> Any:
        if node.target is ALL_TO_ALL:
            payload, out_splits, in_splits = (self.value(arg) for arg in node.args[:3])
            return self.all_to_all(payload, out_splits, in_splits, node.args[3])
        if node.target is WAIT:
            value = self.value(node.args[0])
            self.expect(isinstance(value, _InFlight), "waits for something that is not a collective")
            return value.arrived
        if node.target is getattr:
            return self.attribute(self.value(node.args[0]), str(node.args[1]))
        if node.op == "call_module":
            handler = _HANDLERS.get(type(self.stage.module(node)))
            if handler is not None:
                return handler(self, self.stage.module(node), *[self.value(arg) for arg in node.args])
        for used in node.all_input_nodes:
            value = self.values[used]
            if isinstance(value, _InFlight):
                self.fail(f"uses '{used.name}' before anything waits for it")
            if isinstance(value, _Rows | _Packed | _Buffer | _Blocks):
                self.fail(f"uses '{used.name}', whose rows have not been put back in the flat model's order yet")
        return None

    def value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    # ids

    def read_ids(self, module: ReadIds, batch: Any) -> Any:
        return _Ids("source", SelectIds((), (), (), ()), module.source)

    def request(self, module: MakeRequest, *sources: Any) -> Any:
        self.sources(module.select, sources)
        return _Ids("request", module.select, module.exchange)

    def route(self, module: RouteIds, *sources: Any) -> Any:
        self.sources(module.select, sources)
        self.counts_match(module.select, module.exchange)
        return _Routed(module.select, module.exchange)

    def sources(self, select: SelectIds, sources: tuple[Any, ...]) -> None:
        found = tuple(source.module if isinstance(source, _Ids) else source for source in sources)
        self.expect(found == self.lookups.sources, "ids are not read from the model's id sources, in their order")
        self.expect(select.sources == self.lookups.sources, "ids are selected from other sources than the model's")

    def counts_match(self, select: SelectIds, exchange: Any) -> None:
        self.expect(
            len(exchange.features_per_rank) == self.world and exchange.starts[-1] == len(select.entries),
            f"{len(select.entries)} features are sent, but the ranks expect {exchange.starts[-1]}",
        )
        weighted = tuple(exchange.starts[rank] + place for rank, run in enumerate(exchange.weighted_per_rank) for place in run)
        self.expect(weighted == select.weighted, "the features that come with weights are not the ones the ranks expect")

    def count_ids(self, module: CountIds, request: Any) -> Any:
        self.expect(isinstance(request, _Ids) and request.kind == "request", "counts something that is not a request for ids")
        return _Ids("counts", request.select, module.exchange)

    def read_sizes(self, module: ReadSizes, received: Any, sent: Any) -> Any:
        self.awaited(received)
        self.expect(isinstance(received, _Ids) and received.kind == "counts received", "reads sizes that no rank has sent")
        self.expect(isinstance(sent, _Ids) and sent.kind == "counts", "does not know what this rank has sent")
        return _Sizes("ids", module.exchange)

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, _Ids) and value.kind == "request":
            return _Ids(name, value.select, value.module)
        if isinstance(value, _Routed) and name == "batch_sizes":
            return _Sizes("batch")
        if isinstance(value, _Sizes) and value.kind == "ids":
            return _Sizes("batch") if name == "batch_sizes" else _Sizes(name)
        return None

    def unpack_ids(self, module: UnpackIds, lengths: Any, values: Any, weights: Any, sizes: Any) -> Any:
        for value, kind in ((lengths, "lengths received"), (values, "values received"), (weights, "weights received")):
            self.awaited(value)
            if value is None and kind.startswith("weights") and not module.exchange.carries_weights:
                continue
            self.expect(isinstance(value, _Ids) and value.kind == kind, f"is not given the {kind.split()[0]} that were received")
        self.expect(isinstance(sizes, _Sizes) and sizes.kind == "ids", "does not know the sizes of what was received")
        self.counts_match(lengths.select, module.exchange)
        return _Routed(lengths.select, module.exchange)

    # pooled rows

    def lookup(self, module: RankLookups, routed: Any) -> Any:
        self.expect(isinstance(routed, _Routed), "looks up ids that were not sent to the tables' owners")
        self.expect(
            len(module.lookups) == self.world,
            f"names the lookups of {len(module.lookups)} ranks, there are {self.world}",
        )
        readers = Counter(x.name for served in module.lookups for x in served)
        owner: dict[str, int] = {}
        for rank, served in enumerate(module.lookups):
            for lookup, bag in zip(served, module.bag_of[rank], strict=True):
                if owner.setdefault(lookup.table, rank) != rank:
                    self.fail(f"table '{lookup.table}' is owned twice: by rank {owner[lookup.table]} and by rank {rank}")
                self.expect(readers[lookup.name] == 1, f"feature '{lookup.name}' is looked up {readers[lookup.name]} times")
                self.expect(self.lookups.lookup.get(lookup.name) == lookup, f"'{lookup.name}' is not a lookup of the model")
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
        for lookup in self.lookups.lookups:
            if lookup.name not in readers:
                self.fail(f"feature '{lookup.name}' is looked up by nobody: table '{lookup.table}' has no owner")
        self.owned = tuple(tuple(x.name for x in served) for served in module.lookups)
        self.widths = tuple(sum(x.dim for x in served) for served in module.lookups)
        world = range(self.world)
        return _Rows(lambda rank: Block(world, (rank,)))

    def permute(self, module: PeerPermute, rows: Any, sizes: Any) -> Any:
        self.batch_sizes(sizes)
        self.expect(isinstance(rows, _Rows), "permutes something that is not pooled rows")
        self.expect(sorted(module.order) == list(range(self.world)), f"its order is not a permutation of the {self.world} ranks")
        for rank in range(self.world):
            self.expect(_natural(rows.layout(rank).rows, self.world), "permutes rows that are not in rank order")
        return _Rows(lambda rank: Block(module.order, rows.layout(rank).owners))

    def declared(self, module: ExchangeRows, rows: Any, sizes: Any) -> Any:
        self.batch_sizes(sizes)
        self.takes(module.exchange, rows)
        return _Blocks(module.exchange)

    def pack(self, module: Pack, rows: Any) -> Any:
        if isinstance(rows, _Ids):
            return rows
        self.expect(isinstance(rows, _Rows), "packs something that is not pooled rows")
        return rows

    def takes(self, exchange: Exchange, rows: Any) -> None:
        """The rows' real layout on every rank is the one the exchange is made for, cut into the runs of its members."""
        self.expect(isinstance(rows, _Rows), "exchanges something that is not pooled rows")
        self.expect(exchange.grid == self.plan.grid, f"the exchange is made for {exchange.grid}, the plan has {self.plan.grid}")
        self.expect(exchange.widths == self.widths, "the exchange expects other numbers of columns than the tables make")
        checked: set[Any] = set()
        for rank in range(self.world):
            layout, source = rows.layout(rank), exchange.source(rank)
            if not layout.same_as(source):
                self.fail(f"on rank {rank} the {exchange.axis} exchange takes {source}, but is given {layout}")
            members = exchange.members(rank)
            if members not in checked:
                checked.add(members)
                runs = [row for member in members for row in exchange.rows_to(member)]
                self.expect(
                    runs == list(source.rows),
                    f"on rank {rank} the rows sent to the members of the {exchange.axis} group are not its rows",
                )

    def splits(self, module: Splits, sizes: Any) -> Any:
        self.batch_sizes(sizes)
        return _Sizes(f"rows_{module.direction}", module.exchange)

    def all_to_all(self, payload: Any, out_splits: Any, in_splits: Any, axis: Any) -> Any:
        if isinstance(payload, _Ids):
            return self.exchange_ids(payload, out_splits, in_splits, axis)
        self.expect(isinstance(payload, _Rows), "sends something that is neither ids nor pooled rows")
        for value, direction in ((in_splits, "in"), (out_splits, "out")):
            self.expect(
                isinstance(value, _Sizes) and value.kind == f"rows_{direction}",
                f"its {direction}put splits are not the sizes of what it {'sends' if direction == 'in' else 'receives'}",
            )
        exchange = in_splits.source
        self.expect(exchange == out_splits.source, "its input and output splits belong to different exchanges")
        self.expect(axis == exchange.axis, f"runs in the {axis} group, its sizes are those of the {exchange.axis} group")
        self.takes(exchange, payload)
        return _InFlight(_Buffer(exchange))

    def exchange_ids(self, payload: _Ids, out_splits: Any, in_splits: Any, axis: Any) -> Any:
        self.expect(axis == "world", f"sends ids in the {axis} group: owners may be any rank of the world")
        if payload.kind == "counts":
            three = [3] * self.world
            self.expect(list(out_splits) == three and list(in_splits) == three, "three numbers go to and come from every rank")
        else:
            for value, direction in ((in_splits, "in"), (out_splits, "out")):
                self.expect(
                    isinstance(value, _Sizes) and value.kind == f"{payload.kind}_{direction}",
                    f"its {direction}put splits are not the sizes of the {payload.kind} "
                    f"it {'sends' if direction == 'in' else 'receives'}",
                )
        return _InFlight(_Ids(f"{payload.kind} received", payload.select, payload.module))

    def unpack(self, module: Unpack, buffer: Any, sizes: Any) -> Any:
        self.awaited(buffer)
        self.batch_sizes(sizes)
        self.expect(isinstance(buffer, _Buffer), "unpacks something that was not received")
        self.expect(
            buffer.exchange == module.exchange,
            f"unpacks a {buffer.exchange.axis} exchange as a {module.exchange.axis} exchange",
        )
        return _Blocks(module.exchange)

    def shuffle(self, module: Shuffle, blocks: Any) -> Any:
        self.expect(isinstance(blocks, _Blocks), "shuffles something that is not the blocks of an exchange")
        exchange = blocks.exchange

        def layout(rank: int) -> Block:
            owners = [owner for member in exchange.members(rank) for owner in exchange.owners(member)]
            return Block(exchange.rows_to(rank), tuple(owners))

        return _Rows(layout)

    def restore(self, module: RestoreColumns, blocks: Any) -> Any:
        self.expect(isinstance(blocks, _Blocks), "is not given the blocks of an exchange")
        exchange = blocks.exchange
        checked: set[Any] = set()
        for rank in range(self.world):
            rows = exchange.rows_to(rank)
            self.expect(tuple(rows) == (rank,), f"rank {rank} gets the samples of ranks {list(rows)[:8]}, it needs its own")
            members = exchange.members(rank)
            if members in checked:
                continue
            checked.add(members)
            arriving = [[name for owner in exchange.owners(member) for name in self.owned[owner]] for member in members]
            self.expect(
                [list(block) for block in module.arrival] == arriving,
                f"the columns that reach rank {rank} are not the ones it sorts",
            )
        names = Counter(name for block in module.arrival for name in block)
        wanted = Counter(lookup.name for lookup in self.lookups.lookups)
        missing = next(iter(wanted - names), None) or next(iter(names - wanted), None)
        self.expect(missing is None, f"the columns of '{missing}' do not arrive exactly once")
        self.restored = True
        return None

    def batch_sizes(self, sizes: Any) -> None:
        self.expect(isinstance(sizes, _Sizes) and sizes.kind == "batch", "is not given the batch sizes of all ranks")

    def awaited(self, value: Any) -> None:
        self.expect(not isinstance(value, _InFlight), "uses the result of a collective before anything waits for it")


def _natural(rows: Any, world: int) -> bool:
    return rows == range(world) or tuple(rows) == tuple(range(world))


_HANDLERS: dict[type[nn.Module], Callable[..., Any]] = {
    ReadIds: _Checker.read_ids,
    MakeRequest: _Checker.request,
    RouteIds: _Checker.route,
    CountIds: _Checker.count_ids,
    ReadSizes: _Checker.read_sizes,
    UnpackIds: _Checker.unpack_ids,
    RankLookups: _Checker.lookup,
    PeerPermute: _Checker.permute,
    ExchangeRows: _Checker.declared,
    Pack: _Checker.pack,
    Splits: _Checker.splits,
    Unpack: _Checker.unpack,
    Shuffle: _Checker.shuffle,
    RestoreColumns: _Checker.restore,
}
