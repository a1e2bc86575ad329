"""From a lowered stage to the graph that is compiled: one function of Dynamo's arguments, tables and all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..graphs import EXTRAS
from ..runtime.base import RankContext
from ..runtime.ids import CountIds, MakeRequest, ReadSizes, UnpackIds
from ..runtime.pooled import MakeOutput, OpenRound
from ..runtime.select import ReadIds
from ..runtime.tables import RankLookups
from ..stage import ALL_TO_ALL, BoundGraph, Stage
from .lift import Lifted
from .modules import Bags, Lookups, Output, Request, Sizes, Told, Uncounted
from .operators import TOLD, Step
from .owners import Ranks
from .records import described

ANCHOR = "dmt_anchor"
"""One more argument of a rewritten graph whose tables are trained: a tensor that requires a gradient, on every rank.

What is computed from it takes part in the backward pass of a rank that owns no table, too.
"""


@dataclass(frozen=True)
class Rewritten:
    """A graph that exchanges, the steps that its operators find by number, and whether :data:`ANCHOR` is its last argument.

    ``parameters`` are the places of parameters among its arguments, each with the rank that owns it; None for what is no table.
    """

    module: fx.GraphModule
    steps: tuple[Step, ...] = ()
    anchored: bool = False
    parameters: tuple[tuple[int, int | None], ...] = ()


def rewritten(module: fx.GraphModule, lifted: Lifted, lowered: Stage, ranks: Ranks) -> Rewritten:
    """Dynamo's graph with its lookups exchanged: collectives are functional ones, in the groups of ``ranks``."""
    return _Writer(module, lifted, lowered, ranks).write()


@dataclass
class _Round:
    step: int
    sources: list[tuple[Any, ...]]


class _Writer:
    def __init__(self, module: fx.GraphModule, lifted: Lifted, stage: Stage, ranks: Ranks) -> None:
        self.original = module
        self.lifted = lifted
        self.stage = stage
        self.ranks = ranks
        self.graph = fx.Graph()
        self.holder = nn.Module()
        self.holder.add_module(EXTRAS, nn.Module())
        self.values: dict[fx.Node, Any] = {}
        self.parameters: dict[str, fx.Node] = {}
        self.rounds: dict[int, _Round] = {}
        self.steps: list[Step] = []
        self.tables = {table.parameter for table in stage.lookups.tables}
        self.context = RankContext(ranks.rank, lifted.root, stage.plan.topology, Uncounted())
        self.bound: BoundGraph = stage.bind(self.context)

    def write(self) -> Rewritten:
        inputs = self._arguments()
        for node in self.stage.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = inputs[node.name]
            elif node.op == "get_attr" and str(node.target) in self.parameters:
                self.values[node] = self.parameters[str(node.target)]
            elif node.op == "call_module" and str(node.target).startswith(f"{EXTRAS}."):
                self._call(node)
            elif node.target is ALL_TO_ALL:
                self._exchange(node)
            else:
                self.values[node] = self.graph.node_copy(node, lambda n: self.values[n])
        for name, child in self.original._modules.items():
            self.holder._modules.setdefault(name, child)
        made = fx.GraphModule(self.holder, self.graph, class_name="Rewritten")
        made.meta.update(self.original.meta)
        # Tables are arguments of what is compiled, which must not keep a model alive that nobody else holds.
        self.context.root = nn.Module()
        return Rewritten(made, tuple(self.steps), self.anchor is not None)

    def _arguments(self) -> dict[str, fx.Node]:
        """All arguments in Dynamo's order."""
        inputs: dict[str, fx.Node] = {}
        given = iter(node for node in self.original.graph.nodes if node.op == "placeholder")
        for (name, parameter), node in zip(self.lifted.arguments, given, strict=True):
            inputs[name] = self.graph.node_copy(node)
            if parameter is not None:
                self.parameters[parameter] = inputs[name]
        root = self.lifted.root
        trained = [t for t in self.tables if root.get_parameter(t).requires_grad]
        self.anchor = self.graph.placeholder(ANCHOR) if trained else None
        return inputs

    def _add(self, node: fx.Node, module: nn.Module, *args: Any) -> None:
        name = str(node.target).partition(".")[2]
        self.holder.get_submodule(EXTRAS).add_module(name, module)
        made = self.graph.create_node("call_module", f"{EXTRAS}.{name}", args, {}, name=node.name)
        made.meta.update(node.meta)
        self.values[node] = made

    def _mapped(self, args: Any) -> Any:
        return fx.node.map_arg(args, lambda n: self.values[n])

    def _call(self, node: fx.Node) -> None:
        module = self.bound.module(str(node.target))
        if isinstance(module, ReadIds):
            # Read together, by the request.
            self.values[node] = (module.source, self._mapped(node.args))
        elif isinstance(module, MakeRequest):
            sources = [self.values[used] for used in node.args]  # type: ignore[index]
            number = module.exchange.round
            step = Step.make(module.select, module.exchange, self.context, self._description())
            self.steps.append(step)
            self.rounds[number] = _Round(step.number, sources)
            self._add(node, Request(step.number), *(tensor for _, tensors in sources for tensor in tensors))
        elif isinstance(module, CountIds):
            self._add(node, Told(), *self._mapped(node.args))
        elif isinstance(module, ReadSizes):
            self._add(node, Sizes(self.rounds[module.exchange.round].step), *self._mapped(node.args))
        elif isinstance(module, UnpackIds):
            self._add(node, Bags(self.rounds[module.exchange.round].step), *self._mapped(node.args))
        elif isinstance(module, RankLookups):
            self._look_up(node, module)
        elif isinstance(module, MakeOutput):
            self._output(node, module)
        elif not isinstance(module, OpenRound):
            self._add(node, module, *self._mapped(node.args))

    def _description(self) -> object:
        owner = {name: rank for rank, names in enumerate(self.stage.plan.tables_of_rank) for name in names}
        tables = [(t.name, t.rows, t.dim, str(t.dtype)) for t in self.stage.lookups.tables]
        return described(self.stage.lookups, owner), tables

    def _look_up(self, node: fx.Node, module: RankLookups) -> None:
        root, rank = self.lifted.root, self.ranks.rank
        tables = module.tables
        read = (x for served in module.lookups for x in served if x.grad)
        training = any(root.get_parameter(tables[x.table].parameter).requires_grad for x in read)
        anchor = self.anchor if training else None
        routed = self.values[node.args[0]]  # type: ignore[index]
        step = self.rounds[_round_of(node)].step
        lookups = Lookups(step, module.lookups[rank], module.bag_of[rank], module.dtype)
        self._add(node, lookups, routed, anchor, *(self.parameters[tables[x.table].parameter] for x in lookups.lookups))

    def _output(self, node: fx.Node, module: MakeOutput) -> None:
        lookup = self.stage.lookups.lookup[module.output.lookups[0]]
        source = self.stage.lookups.sources[lookup.source]
        (tensors,) = [given for one, given in self.rounds[source.round].sources if one.node == source.node and one == source]
        offsets = [tensors[1]] if source.form == "offsets" else []
        made = Output(module.output, lookup.dim, source.include_last_offset)
        self._add(node, made, self.values[node.args[0]], tensors[0], *offsets)  # type: ignore[index]

    def _exchange(self, node: fx.Node) -> None:
        buffer, out_splits, in_splits, axis = node.args
        names: Mapping[str, str] = self.ranks.groups.names()
        if isinstance(buffer, fx.Node) and self._tells(buffer):
            out_splits = in_splits = [TOLD] * self.ranks.dense.size()
        args = (*self._mapped((buffer, out_splits, in_splits)), names[str(axis)])
        made = self.graph.create_node("call_function", ALL_TO_ALL, args, {}, name=node.name)
        made.meta.update(node.meta)
        self.values[node] = made

    def _tells(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.bound.module(str(node.target)), CountIds)


def _round_of(node: fx.Node) -> int:
    """The round that a node of a lowered graph belongs to, by the prefix that passes give it."""
    found = re.match(r"round_(\d+)_", node.name)
    return int(found[1]) if found is not None else 0
