"""Graph nodes of a stage as plain data: what a node does, for which step and tower, and where the user wrote it."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..errors import source_location
from ..exchange import Exchange, IdExchange
from ..graphs import EXTRAS
from ..runtime.pooled import JoinColumns, MakeOutput, Pack, PeerPermute, RestoreColumns
from ..runtime.tables import RankLookups, TowerLookups
from ..runtime.tower_rows import RunTower, SendColumns
from ..runtime.vectors import LayVectors, ReplaceColumns, TakeVectors
from ..stage import ALL_TO_ALL, PASS, STEP, WAIT, Stage
from .facts import IdsFacts, RowsFacts, Share, ids_facts, rows_facts, share
from .words import counted, cut, listed, span, span_of

_LONGEST_TEXT = 240
_ITEMS_SHOWN = 3
_MOST_MODULES = 3


@dataclass(frozen=True)
class NodeView:
    """One node of one stage.

    Attributes:
        name: as in the graph.
        kind: the operation, without the node's own name and arguments; equal for nodes that do the same.
        text: the node as a line of Python.
        step: the SPTT step, "a" to "g", or another word that the pass chose; empty for the user's own nodes.
        made_by: the pass that made the node; empty for the user's own.
        tower: the tower that the node belongs to; None if it belongs to all.
        location: the user's file:line.
        note: what the node does that its text does not say.
        shares: the lookups that it runs, by tower.
        exchange: the exchange that it is, or is a part of.
        group: name of the first node of that exchange in the stage.
    """

    name: str
    kind: str
    text: str
    step: str = ""
    made_by: str = ""
    tower: int | None = None
    location: str | None = None
    note: str = ""
    shares: tuple[Share, ...] = ()
    exchange: RowsFacts | IdsFacts | None = None
    group: str = ""


class Describer:
    """Makes the views of one stage's nodes."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._first: dict[int, str] = {}
        self._facts: dict[int, RowsFacts | IdsFacts] = {}
        self._outputs = {output.node: output for output in stage.lookups.outputs}
        for node in stage.graph.nodes:
            record = self._record(node)
            if record is not None:
                self._first.setdefault(id(record), node.name)

    def view(self, node: fx.Node) -> NodeView:
        """The view of ``node``, which is in the stage."""
        module = self._module(node)
        record = self._record(node)
        return NodeView(
            name=node.name,
            kind=_kind(node, module),
            text=_text(node),
            step=str(node.meta.get(STEP, "")),
            made_by=str(node.meta.get(PASS, "")),
            tower=module.tower if isinstance(module, TowerLookups) else None,
            location=source_location(node),
            note=self._note(node, module),
            shares=tuple(self._shares(module)),
            exchange=None if record is None else self._facts_of(record),
            group="" if record is None else self._first[id(record)],
        )

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.stage.module(node) if node.op == "call_module" else None

    def _record(self, node: fx.Node) -> Exchange | IdExchange | None:
        """The exchange that a node is, or is a part of once it is lowered."""
        module = self._module(node)
        record = getattr(module, "exchange", None)
        if isinstance(record, Exchange | IdExchange):
            return record
        if isinstance(module, Pack):
            transfer = next((user for user in node.users if user.target is ALL_TO_ALL), None)
            return None if transfer is None else self._record(transfer)
        if node.target is ALL_TO_ALL:
            # The buffer last: it may be a Pack, which asks the transfer.
            for part in (node.args[1], node.args[2], node.args[0]):
                if isinstance(part, fx.Node) and not isinstance(self._module(part), Pack):
                    found = self._record(part)
                    if found is not None:
                        return found
        elif (node.target is WAIT or node.target is builtins.getattr) and isinstance(node.args[0], fx.Node):
            return self._record(node.args[0])
        return None

    def _facts_of(self, record: Exchange | IdExchange) -> RowsFacts | IdsFacts:
        facts = self._facts.get(id(record))
        if facts is None:
            topology = self.stage.plan.topology
            facts = rows_facts(record, topology) if isinstance(record, Exchange) else ids_facts(record, topology)
            self._facts[id(record)] = facts
        return facts

    def _shares(self, module: nn.Module | None) -> Iterator[Share]:
        plan = self.stage.plan
        if isinstance(module, TowerLookups):
            yield share(plan, module.tower, module.lookups)
        elif isinstance(module, RankLookups):
            for index, tower in enumerate(plan.towers):
                yield share(plan, index, [lookup for rank in tower.ranks for lookup in module.lookups[rank]])

    def _note(self, node: fx.Node, module: nn.Module | None) -> str:
        lookups = self.stage.lookups
        if node.name in self._outputs:
            served = [lookups.lookup[name] for name in self._outputs[node.name].lookups]
            tables = counted(len({lookup.table for lookup in served}), "table")
            return f"{counted(len(served), 'lookup')} in {tables}, {counted(sum(x.dim for x in served), 'column')}"
        if isinstance(module, PeerPermute):
            if module.order == tuple(range(len(module.order))):
                return "rank order is peer order: rows stay"
            return f"rows into peer order: ranks {listed(map(str, module.order), 40)}"
        if isinstance(module, RunTower):
            shown = ", ".join(f"tower {one.tower}: {sum(one.widths)} to {one.columns}" for one in module.records[:_MOST_MODULES])
            more = len(module.records) - _MOST_MODULES
            return f"columns of {shown}{f', {more:,} more' if more > 0 else ''}"
        if isinstance(module, SendColumns):
            raw = sum(lookups.lookup[name].dim for name in module.raw)
            return f"{counted(sum(module.made), 'column')} of the modules, {counted(raw, 'column')} as they are"
        if isinstance(module, JoinColumns | RestoreColumns):
            return f"{counted(lookups.width, 'column')} back in the flat model's order"
        if isinstance(module, MakeOutput):
            return f"the value that {module.output.node} had"
        if isinstance(module, TakeVectors):
            return f"{counted(len(module.names), 'vector')} of {span(span_of(module.widths))} columns: {listed(module.names, 40)}"
        if isinstance(module, LayVectors):
            return f"{counted(len(module.pieces), 'vector')} that towers have made, in the place of the model's"
        if isinstance(module, ReplaceColumns):
            return f"the value that {module.output.node} had, its columns brought back by the towers' layers"
        return ""


def _kind(node: fx.Node, module: nn.Module | None) -> str:
    if module is not None:
        return type(module).__name__
    return _function_name(node.target) if callable(node.target) else f"{node.op} {node.target}"


def _function_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).removesuffix(".default")


def signature(node: fx.Node) -> tuple[str, str, str]:
    """Operation, target and arguments, complete: equal for nodes of two stages that compute the same from the same."""
    target = f"{_function_name(node.target)}@{id(node.target)}" if callable(node.target) else str(node.target)
    return node.op, target, repr((node.args, node.kwargs))


def _text(node: fx.Node) -> str:
    expression = _expression(node)
    target = str(node.target).removeprefix(f"{EXTRAS}.")
    named_alike = node.op in ("placeholder", "output") or (
        node.op in ("call_module", "get_attr") and node.name == target.replace(".", "_").lstrip("_")
    )
    return cut(expression if named_alike else f"{node.name} = {expression}", _LONGEST_TEXT)


def _expression(node: fx.Node) -> str:
    args = [_argument(arg) for arg in node.args]
    if node.op == "placeholder":
        return f"input {node.target}"
    if node.op == "output":
        return f"return {args[0]}"
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "call_function" and not node.kwargs and len(args) == 2:
        if node.target is operator.getitem:
            index = node.args[1]
            inside = ", ".join(map(_argument, index)) if isinstance(index, tuple) and index else args[1]
            return f"{args[0]}[{inside}]"
        if node.target is builtins.getattr:
            return f"{args[0]}.{node.args[1]}"
    keywords = [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:] + keywords)})"
    called = _function_name(node.target) if callable(node.target) else str(node.target).removeprefix(f"{EXTRAS}.")
    if len(args) > 2 * _ITEMS_SHOWN:
        args = _some(args)
    return f"{called}({', '.join(args + keywords)})"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, slice):
        ends = ["" if end is None else _argument(end) for end in (value.start, value.stop)]
        return ":".join(ends) + ("" if value.step is None else f":{_argument(value.step)}")
    if isinstance(value, list | tuple):
        left, right = ("[", "]") if isinstance(value, list) else ("(", ")")
        return f"{left}{', '.join(_some([_argument(item) for item in value[: 2 * _ITEMS_SHOWN]], len(value)))}{right}"
    if isinstance(value, dict):
        items = [f"{key!r}: {_argument(item)}" for key, item in list(value.items())[: 2 * _ITEMS_SHOWN]]
        return f"{{{', '.join(_some(items, len(value)))}}}"
    if isinstance(value, str):
        return cut(repr(value), 32)
    if value is None or value is ... or isinstance(value, bool | int | float | torch.dtype | torch.device):
        return str(value).replace("Ellipsis", "...")
    return type(value).__name__


def _some(items: Sequence[str], total: int | None = None) -> list[str]:
    total = len(items) if total is None else total
    if total <= 2 * _ITEMS_SHOWN:
        return list(items)
    return [*items[:_ITEMS_SHOWN], f"... {total - _ITEMS_SHOWN:,} more"]
