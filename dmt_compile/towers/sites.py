"""Where in a flat graph the vectors of its features lie together before anything mixes them: where tower modules come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from ..interactions.block import laid
from ..interactions.tape import Op, Tape, sample
from ..lookups import Lookup, LookupSet

Axis = Literal["batch", "vectors", "width", "columns"] | int
"""What an axis of a value counts: samples, vectors, the columns of one vector, or of all of them side by side; or its size."""

_CAT = (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat.default)
_STACK = (torch.stack, torch.ops.aten.stack.default)


@dataclass(frozen=True)
class Site:
    """A value that holds the vectors of some lookups, each once, in the order of ``lookups``; its axes are ``axes``.

    It is the value of ``node`` itself, or, if ``parts`` is not empty, what these values bring into it: ``node`` then puts them,
    along axis ``dim``, beside other values, and ``axes`` are those of all of them together.
    """

    node: fx.Node
    lookups: tuple[str, ...]
    axes: tuple[Axis, ...]
    parts: tuple[Site, ...] = ()
    dim: int = 0


@dataclass(frozen=True)
class Sites:
    """All places where tower modules replace the vectors of ``lookups``, and nodes that take these vectors elsewhere."""

    lookups: tuple[str, ...]
    sites: tuple[Site, ...]
    elsewhere: tuple[fx.Node, ...]


def one_vector(lookups: LookupSet) -> dict[str, Lookup]:
    """The lookups that make one vector of several columns per sample and need no other lookup."""
    found = {}
    for lookup in lookups.lookups:
        source = lookups.sources[lookup.source]
        single = lookup.pooling != "rows" or source.count == 1
        if source.round == 0 and source.unit == "sample" and single and lookup.dim > 1:
            found[lookup.name] = lookup
    return found


def find_sites(graph: fx.Graph, tape: Tape, lookups: LookupSet) -> Sites | None:
    """The sites of the largest set of lookups whose vectors lie together somewhere; None if there is none."""
    return _Finder(graph, tape, lookups).find()


def each_vector(graph: fx.Graph, tape: Tape, lookups: LookupSet) -> Sites | None:
    """A site wherever vectors first stand alone or together: for modules that make one vector for each."""
    return _Finder(graph, tape, lookups).each()


class _Finder:
    def __init__(self, graph: fx.Graph, tape: Tape, lookups: LookupSet) -> None:
        self.graph = graph
        self.tape = tape
        self.known = one_vector(lookups)
        self.label = {source.name: label for label, source in tape.sources.items() if source.name in self.known}
        self.calls = {output.node for output in lookups.outputs}
        self.ops: dict[fx.Node, list[Op]] = {}
        for op in tape.ops:
            self.ops.setdefault(op.node, []).append(op)
        self.raw: set[fx.Node] = set()
        self.containers: set[fx.Node] = set()

    def find(self) -> Sites | None:
        self._raw_values()
        places: list[Site] = []
        for node in self.graph.nodes:
            site = self._whole(node) if node in self.raw and node not in self.containers else self._beside(node)
            if site is not None:
                places.append(site)
        if not places:
            return None
        chosen = frozenset(max(places, key=lambda site: len(site.lookups)).lookups)
        # Views of such a value, and picks from it, are made of its replacement.
        complete = {site.node: site for site in places if frozenset(site.lookups) == chosen}
        behind = {node for node in self.raw if self._after(node, complete)}
        done = behind | set(complete)
        first = [
            site for site in complete.values() if site.node not in behind and not done >= {part.node for part in site.parts} > set()
        ]
        behind |= {site.node for site in first if not site.parts}
        elsewhere = [
            user
            for node in self.graph.nodes
            if node in self.raw and node not in behind and (node in self.containers or chosen & set(self.names(node)))
            for user in node.users
            if user not in self.raw
            and not (user in complete and complete[user] in first and any(part.node is node for part in complete[user].parts))
        ]
        order = next(site.lookups for site in first)
        return Sites(order, tuple(first), tuple(dict.fromkeys(elsewhere)))

    def each(self) -> Sites | None:
        """Every first value of looked-up vectors, whether of one or of several lookups."""
        self._raw_values()
        found = {node: self._laid(node) for node in self.graph.nodes if node in self.raw and node not in self.containers}
        places = {node: Site(node, *one) for node, one in found.items() if one is not None}
        first = [site for node, site in places.items() if not self._after(node, places)]
        names = {name for site in first for name in site.lookups}
        covered = {node for node in found if node in places or self._after(node, places)}
        elsewhere = [
            user
            for node in self.graph.nodes
            if node in self.raw and node not in covered
            for user in node.users
            if user not in self.raw
        ]
        order = tuple(name for name in self.known if name in names)
        return Sites(order, tuple(first), tuple(dict.fromkeys(elsewhere))) if order else None

    def _raw_values(self) -> None:
        """Values that are nothing but looked-up vectors, and containers of such."""
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            call = node.name in self.calls
            taken = [used for used in node.all_input_nodes if self.tape.held.get(used) is not None or used in self.raw]
            if not call and (not taken or not all(used in self.raw for used in taken)):
                continue
            moved = call or all(op.family == "move" for op in self.ops.get(node, ()))
            several = node in self.tape.several
            if moved and (several or self._pure(node)):
                self.raw.add(node)
                if several:
                    self.containers.add(node)

    def _pure(self, node: fx.Node) -> bool:
        number = self.tape.held.get(node)
        if number is None:
            return False
        labels = self.tape.values[number].labels
        return labels is not None and bool((labels > 0).all()) and self.tape.present(number) <= set(self.label.values())

    def names(self, node: fx.Node) -> tuple[str, ...]:
        """The lookups of a value."""
        if node in self.containers or node not in self.tape.held:
            return ()
        return tuple(self.tape.sources[label].name for label in self.tape.present(self.tape.held[node]))

    def _after(self, node: fx.Node, complete: Mapping[fx.Node, Site]) -> bool:
        """Whether a value is made of one that is replaced."""
        waiting, seen = list(node.all_input_nodes), set[fx.Node]()
        while waiting:
            used = waiting.pop()
            if used in seen or used not in self.raw:
                continue
            seen.add(used)
            if used in complete and not complete[used].parts:
                return True
            waiting += used.all_input_nodes
        return False

    def _whole(self, node: fx.Node) -> Site | None:
        laid_out = self._laid(node)
        return Site(node, *laid_out) if laid_out is not None and len(laid_out[0]) > 1 else None

    def _laid(self, node: fx.Node) -> tuple[tuple[str, ...], tuple[Axis, ...]] | None:
        """The lookups whose vectors a value holds, each once and whole, and its axes."""
        number = self.tape.held[node]
        places = laid(self.tape, number)
        names = tuple(self.tape.sources[label].name for label, _ in places.runs)
        if len(set(names)) != len(names) or any(
            width != self.known[name].dim for name, (_, width) in zip(names, places.runs, strict=True)
        ):
            return None
        value = self.tape.values[number]
        axes: list[Axis] = list(value.shape)
        assert value.labels is not None
        if places.batch_axis is None or sample(value.labels, self.tape.batch)[1] != places.batch_axis:
            return None
        axes[places.batch_axis] = "batch"
        if places.vector_axis is not None and places.width_axis is not None:
            axes[places.vector_axis], axes[places.width_axis] = "vectors", "width"
        elif places.width_axis is not None:
            axes[places.width_axis] = "columns"
        left = [axis for axis in axes if isinstance(axis, int)]
        return (names, tuple(axes)) if all(size == 1 for size in left) and len(left) < len(axes) - 1 else None

    def _beside(self, node: fx.Node) -> Site | None:
        """Vectors that a concatenation puts beside other values."""
        if node.target not in (*_CAT, *_STACK) or node in self.raw:
            return None
        args = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
        if not isinstance(args, Sequence) or not isinstance(dim, int):
            return None
        parts = [arg for arg in args if isinstance(arg, fx.Node) and arg in self.raw and arg not in self.containers]
        made = [self._laid(part) for part in parts]
        if not parts or any(one is None for one in made) or len(set(parts)) != len(parts):
            return None
        names = [name for one in made if one is not None for name in one[0]]
        axes = self._joined([one for one in made if one is not None], dim, node.target in _STACK)
        if axes is None or len(set(names)) != len(names):
            return None
        at = dim % len(axes)
        inner = tuple(Site(part, *one) for part, one in zip(parts, made, strict=True) if one is not None)
        return Site(node, tuple(names), axes, inner, at)

    def _joined(
        self, parts: Sequence[tuple[tuple[str, ...], tuple[Axis, ...]]], dim: int, stacked: bool
    ) -> tuple[Axis, ...] | None:
        """The axes of what parts make side by side; None if they do not lie there as vectors."""
        found: set[tuple[Axis, ...]] = set()
        for names, axes in parts:
            rank = len(axes) + stacked
            at = dim % rank
            one = list(axes)
            if stacked:
                one.insert(at, 1)
            if one[at] == 1 and len(names) == 1 and one.count("columns") == 1:
                one[at], one[one.index("columns")] = "vectors", "width"
            elif one[at] not in ("vectors", "columns"):
                return None
            found.add(tuple(one))
        return found.pop() if len(found) == 1 else None
