"""What changed between two stages, as plain data. :mod:`.diff_view` lays it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from ..stage import Stage
from .fold import moved
from .nodes import Describer, NodeView, signature


@dataclass(frozen=True)
class Move:
    """A node that stands elsewhere in the order: now between ``behind`` and ``ahead``, which did not move (empty at the ends)."""

    node: NodeView
    behind: str
    ahead: str


@dataclass(frozen=True)
class Rewiring:
    """A node of both stages that now computes something else: it ``reads`` nodes ``instead`` of others.

    Both are empty where other arguments, or the module that it calls, changed.
    """

    node: NodeView
    reads: tuple[str, ...]
    instead: tuple[str, ...]


@dataclass(frozen=True)
class StageDiff:
    """The difference between two stages; nodes correspond by name.

    ``removed`` stand in graph order of the stage before, all others in that of the stage after. ``moved`` is the smallest set of
    nodes whose order changed. ``kept`` counts the nodes of both stages that did not move, so that ``before_nodes`` = removed +
    moved + kept and ``after_nodes`` = added + moved + kept; ``rewired`` are some of the kept and the moved.
    """

    before: str
    after: str
    before_nodes: int
    after_nodes: int
    removed: tuple[NodeView, ...]
    added: tuple[NodeView, ...]
    moved: tuple[Move, ...]
    rewired: tuple[Rewiring, ...]
    kept: int

    @property
    def empty(self) -> bool:
        """Whether the two stages are equal."""
        return not (self.removed or self.added or self.moved or self.rewired)

    def __str__(self) -> str:
        from .diff_view import diff_text

        return diff_text(self)

    def __rich__(self) -> object:
        from .diff_view import DiffView

        return DiffView(self)


def diff_stages(before: Stage, after: Stage) -> StageDiff:
    """Compare two stages, in either direction, node by node."""
    old: dict[str, fx.Node] = {node.name: node for node in before.graph.nodes}
    new: dict[str, fx.Node] = {node.name: node for node in after.graph.nodes}
    common = [name for name in new if name in old]
    shifted = set(moved([name for name in old if name in new], common))
    view_old, view_new = Describer(before).view, Describer(after).view
    same_modules = before.root is after.root
    changes = []
    for name in common:
        mine, theirs = new[name], old[name]
        swapped = same_modules and mine.op == "call_module" == theirs.op and after.module(mine) is not before.module(theirs)
        if swapped or signature(mine) != signature(theirs):
            reads, instead = _inputs(mine), _inputs(theirs)
            now = tuple(used for used in reads if used not in instead)
            then = tuple(used for used in instead if used not in reads)
            changes.append(Rewiring(view_new(mine), now, then))
    return StageDiff(
        before=before.name,
        after=after.name,
        before_nodes=len(old),
        after_nodes=len(new),
        removed=tuple(view_old(node) for name, node in old.items() if name not in new),
        added=tuple(view_new(node) for name, node in new.items() if name not in old),
        moved=tuple(Move(view_new(new[name]), *around) for name, around in _neighbours(list(new), shifted)),
        rewired=tuple(changes),
        kept=len(common) - len(shifted),
    )


def _inputs(node: fx.Node) -> dict[str, None]:
    return {used.name: None for used in node.all_input_nodes}


def _neighbours(order: Sequence[str], shifted: set[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each name in ``shifted``, in order, with the nearest names on both sides that are not."""
    waiting: list[str] = []
    behind = ""
    for name in (*order, ""):
        if name in shifted:
            waiting.append(name)
            continue
        for one in waiting:
            yield one, (behind, name)
        waiting = []
        behind = name
