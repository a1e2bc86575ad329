"""Tower modules in a flat graph: vectors out of the lookups, through their tower's module, back to where the model has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ..graphs import EXTRAS, closure, copy_graph, extras_of, move_before
from ..lookups import LookupSet
from ..runtime.vectors import FlatColumns, LayVectors, ReplaceColumns, TakeVectors
from ..shapes import SHAPE
from ..stage import PASS, STEP
from .record import EXPANSIONS, TowerVectors
from .sites import _STACK, Site, Sites

PASS_NAME = "tower-modules"


@dataclass
class Inserted:
    """A graph with tower modules; ``laid`` are the nodes that lay their vectors out, by the site that each stands for."""

    graph: fx.Graph
    extras: dict[str, nn.Module]
    laid: dict[fx.Node, Site] = field(default_factory=dict)
    towers: list[fx.Node] = field(default_factory=list)


def kept_count(vectors: Sequence[TowerVectors]) -> bool:
    """Whether every tower makes as many vectors as it has features, so that each can stand in its feature's place."""
    return all(one.passes or one.vectors == len(one.lookups) for one in vectors)


def pieces_of(vectors: Sequence[TowerVectors], order: Sequence[str]) -> tuple[tuple[int, int, int], ...]:
    """The vectors in the order in which the interaction gets them: tower number in ``vectors``, first column, columns.

    Where every tower makes one for each of its features these keep the order of the features, else towers follow one another.
    """
    if not kept_count(vectors):
        return tuple((number, place * one.width, one.width) for number, one in enumerate(vectors) for place in range(one.vectors))
    place: dict[str, tuple[int, int, int]] = {}
    for number, one in enumerate(vectors):
        start = 0
        for name, width in zip(one.lookups, one.widths, strict=True):
            made = width if one.passes else one.width
            place[name] = (number, start, made)
            start += made
    return tuple(place[name] for name in order)


class _Inserter:
    def __init__(self, flat: fx.GraphModule, lookups: LookupSet, vectors: Sequence[TowerVectors]) -> None:
        self.graph = copy_graph(flat.graph)
        self.extras = dict(extras_of(flat))
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.lookups = lookups
        self.vectors = vectors
        self.like: fx.Node | None = None
        self.taking: set[fx.Node] = set()

    def call(self, name: str, target: str, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_module", target, args, {}, name=name)
        node.meta[PASS], node.meta[STEP] = PASS_NAME, "f"
        if self.like is not None:
            node.stack_trace = self.like.stack_trace
        return node

    def own(self, name: str, module: nn.Module, *args: Any) -> fx.Node:
        self.extras[name] = module
        return self.call(name, f"{EXTRAS}.{name}", *args)

    def calls(self) -> dict[int, fx.Node]:
        """The calls of the lookups that the towers take, by the number of their output."""
        numbers = {self.lookups.lookup[name].output for one in self.vectors for name in one.lookups}
        return {number: self.nodes[self.lookups.outputs[number].node] for number in sorted(numbers)}

    def towers(self, point: fx.Node) -> tuple[list[fx.Node], fx.Node]:
        """Each tower's module on its vectors, (B, columns), before ``point`` or a node behind it, which is returned too."""
        calls = self.calls()
        needed = closure(list(calls.values()))
        while point in needed:
            point = point.next
        move_before(self.graph, point, list(calls.values()))
        made = []
        with self.graph.inserting_before(point):
            for one in self.vectors:
                numbers = sorted({self.lookups.lookup[name].output for name in one.lookups})
                outputs = [self.lookups.outputs[number] for number in numbers]
                self.like = calls[numbers[0]]
                taken = self.own(
                    f"vectors_{one.tower}",
                    TakeVectors(one.lookups, outputs, self.lookups),
                    *[calls[number] for number in numbers],
                )
                self.taking.add(taken)
                compressed = self.call(f"module_{one.tower}", one.target, taken)
                made.append(self.own(f"tower_columns_{one.tower}", FlatColumns(one.columns), compressed))
        return made, point


def insert_at_sites(flat: fx.GraphModule, lookups: LookupSet, vectors: Sequence[TowerVectors], sites: Sites) -> Inserted:
    """The graph with what towers make in the place of their features' vectors."""
    inserter = _Inserter(flat, lookups, vectors)
    graph = inserter.graph
    order = {node.name: place for place, node in enumerate(flat.graph.nodes)}
    places = sorted(sites.sites, key=lambda site: order[site.node.name])
    first = inserter.nodes[places[0].node.name]
    point = first if places[0].parts else first.next
    towers, point = inserter.towers(point)
    inserted = Inserted(graph, inserter.extras, towers=towers)
    before = {node for node in _until(graph, point)}
    for number, site in enumerate(places):
        node = inserter.nodes[site.node.name]
        inserter.like = node
        if site.parts and kept_count(vectors):
            # Each in its place: other values may stand between them.
            for place, part in enumerate(site.parts):
                with graph.inserting_before(node):
                    laid = inserter.own(f"laid_{number}_{place}", LayVectors(pieces_of(vectors, part.lookups), part.axes), *towers)
                node.replace_input_with(inserter.nodes[part.node.name], laid)
                inserted.laid[laid] = part
            continue
        behind = node if site.parts else point if node in before else node.next
        with graph.inserting_before(behind):
            laid = inserter.own(f"laid_{number}", LayVectors(pieces_of(vectors, site.lookups), site.axes), *towers)
        if site.parts:
            _put_among(graph, node, {inserter.nodes[part.node.name] for part in site.parts}, laid, site.dim)
        else:
            node.replace_all_uses_with(laid, delete_user_cb=lambda user: user not in inserter.taking)
        inserted.laid[laid] = site
    _drop_unused(graph, {node for node in inserter.nodes.values() if node.name in order})
    return inserted


def _until(graph: fx.Graph, point: fx.Node) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node is point:
            return
        yield node


def _put_among(graph: fx.Graph, node: fx.Node, parts: set[fx.Node], laid: fx.Node, dim: int) -> None:
    """Let a concatenation take ``laid`` in the place of ``parts``, where the first of them stands."""
    args: Any = node.args[0] if node.args else node.kwargs["tensors"]
    stacked = node.target in _STACK
    given: list[Any] = []
    for arg in args:
        if arg in parts:
            if laid not in given:
                given.append(laid)
        elif stacked:
            # Beside vectors that have the axis already.
            with graph.inserting_before(node):
                given.append(graph.call_method("unsqueeze", (arg, dim)))
            given[-1].meta.update({key: value for key, value in node.meta.items() if key != SHAPE})
        else:
            given.append(arg)
    if stacked:
        node.target = torch.cat
    node.args, node.kwargs = (given, dim), {}


def _drop_unused(graph: fx.Graph, flat: set[fx.Node]) -> None:
    """Remove the flat model's nodes whose values only led to vectors that are replaced."""
    for node in reversed(list(graph.nodes)):
        if node in flat and node.op in ("call_function", "call_method") and not node.users and not node.is_impure():
            graph.erase_node(node)


def insert_expanded(flat: fx.GraphModule, lookups: LookupSet, vectors: Sequence[TowerVectors]) -> Inserted:
    """The graph with each tower's vectors brought back to their old width behind its module, by a layer of the tower's own."""
    inserter = _Inserter(flat, lookups, vectors)
    calls = inserter.calls()
    place = {node: number for number, node in enumerate(inserter.graph.nodes)}
    first = min(calls.values(), key=lambda node: place[node])
    users = {number: list(call.users) for number, call in calls.items()}
    towers, last = inserter.towers(first.next)
    inserted = Inserted(inserter.graph, inserter.extras, towers=towers)
    with inserter.graph.inserting_before(last):
        wide = [
            made if one.passes else inserter.call(f"expanded_{one.tower}", f"{EXPANSIONS}.{one.tower}", made)
            for one, made in zip(vectors, towers, strict=True)
        ]
        for number, call in calls.items():
            inserter.like = call
            module = ReplaceColumns(lookups.outputs[number], lookups, vectors)
            replaced = inserter.own(f"replaced_{number}", module, call, *wide)
            for user in users[number]:
                user.replace_input_with(call, replaced)
            if SHAPE in call.meta:
                replaced.meta[SHAPE] = call.meta[SHAPE]
    return inserted


def with_arguments(graph: fx.Graph, changed: Mapping[str, Mapping[Any, Any]]) -> None:
    """Replace numbers in the arguments of nodes, by the nodes' names and the numbers' paths."""
    from ..resize.literals import replaced

    for node in graph.nodes:
        if node.name in changed:
            found = dict(changed[node.name])
            positional = {path: value for path, value in found.items() if isinstance(path[0], int)}
            named = {path: value for path, value in found.items() if isinstance(path[0], str)}
            node.args = replaced(node.args, positional)
            node.kwargs = replaced(dict(node.kwargs), named)
