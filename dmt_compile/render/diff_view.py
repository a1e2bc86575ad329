"""A :class:`StageDiff` laid out in lines: by section, in graph order, with towers and exchanges as blocks of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .diff import Move, Rewiring, StageDiff
from .facts import EXCHANGE_NAMES, IdsFacts, RowsFacts, Share
from .fold import Run, fold
from .nodes import NodeView
from .text import WIDTH, to_text
from .words import counted, cut, listed, place, plain, ranks, size_span, span_of, spanned

_MOST_BLOCKS = 24
_MOST_SMALL_BLOCKS = 12
_MOST_TOWERS = 4
_NARROWEST = 40
_HEADING, _NODE, _DETAIL = 2, 7, 11
_STYLES = {"-": "red", "+": "green", "~": "yellow", ">": "cyan"}
_STEPS = "abcdefg"
_NUMBER = re.compile(r"_\d+\b")


def diff_text(diff: StageDiff) -> str:
    """The diff at 80 columns without colour."""
    return to_text(DiffView(diff))


class DiffView:
    """The diff as a rich renderable, as wide as the console."""

    def __init__(self, diff: StageDiff) -> None:
        self.diff = diff

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in _Layout(max(options.max_width, _NARROWEST)).lines(self.diff):
            line.no_wrap, line.overflow = True, "crop"
            yield line


class _Layout:
    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self.below: set[RowsFacts | IdsFacts | None] = set()

    def lines(self, diff: StageDiff) -> Iterator[Text]:
        if diff.empty:
            yield Text(f"{diff.before} -> {diff.after}: no difference, {counted(diff.after_nodes, 'node')}", "bold")
            return
        yield Text(f"{diff.before} -> {diff.after}: {diff.before_nodes:,} nodes become {diff.after_nodes:,}", "bold")
        yield Text(
            f"{len(diff.removed):,} removed, {len(diff.added):,} added, {len(diff.moved):,} moved, {diff.kept:,} kept in place"
            + (f"; {len(diff.rewired):,} rewired" if diff.rewired else "")
        )
        # An exchange that another stage only writes differently is described once, with the nodes added.
        self.below = {node.exchange for node in diff.added if node.exchange}
        yield from self._section("Removed", "-", diff.removed)
        self.below = set()
        spmd = all(node.made_by for node in diff.added)
        yield from self._section("Added, alike on every rank" if spmd else "Added", "+", diff.added)
        yield from self._moved(diff.moved)
        yield from self._rewired(diff.rewired)
        yield from self._legend(diff)

    def _section(self, title: str, sign: str, nodes: Sequence[NodeView]) -> Iterator[Text]:
        if not nodes:
            return
        yield from self._title(f"{title}: {counted(len(nodes), 'node')}")
        yield from self._capped([list(block) for block in self._blocks(sign, nodes)])

    def _blocks(self, sign: str, nodes: Sequence[NodeView]) -> Iterator[Iterator[Text]]:
        """What must not be torn apart: an exchange, the nodes of one tower, a repeated pattern, a node with its details."""
        parts: dict[str, list[NodeView]] = {}
        for node in nodes:
            if node.group:
                parts.setdefault(node.group, []).append(node)
        single = [node for node in nodes if not node.group or parts[node.group][0] is node]
        for tower_run, run in groupby(single, lambda node: node.tower is not None):
            listed_run = list(run)
            if tower_run:
                yield from self._towers(sign, listed_run)
                continue
            for folded in fold(listed_run, [_shape(node) for node in listed_run]):
                if folded.repeats > 1:
                    yield self._repeated(sign, folded)
                else:
                    (node,) = folded.pattern
                    yield self._exchange(sign, parts[node.group]) if node.group else self._node(sign, node)

    def _towers(self, sign: str, nodes: Sequence[NodeView]) -> Iterator[Iterator[Text]]:
        """Nodes that belong to one tower each, tower by tower; many towers fold."""
        towers: dict[int | None, list[NodeView]] = {}
        for node in nodes:
            towers.setdefault(node.tower, []).append(node)
        shown = list(towers.values())
        rest: list[list[NodeView]] = []
        if len(shown) > _MOST_TOWERS:
            shown, rest = shown[: _MOST_TOWERS - 1], shown[_MOST_TOWERS - 1 :]
        for members in shown:
            yield self._tower(sign, members)
        if rest:
            shares = [piece for members in rest for node in members for piece in node.shares]
            yield iter([self._indented(_HEADING, f"{_many_towers(shares)}, {counted(sum(map(len, rest)), 'node')} in all")])

    def _tower(self, sign: str, nodes: Sequence[NodeView]) -> Iterator[Text]:
        for piece in nodes[0].shares:
            yield self._indented(_HEADING, _share(piece, self.width - _HEADING))
        for node in nodes:
            yield self._line(node.step, sign, node.text, node.location)

    def _node(self, sign: str, node: NodeView) -> Iterator[Text]:
        yield self._line(node.step, sign, node.text, node.location)
        yield from self._details(node)

    def _details(self, node: NodeView) -> Iterator[Text]:
        if node.note:
            yield self._detail(node.note)
        shares = node.shares
        many = len(shares) > _MOST_TOWERS
        for piece in shares[: _MOST_TOWERS - 1] if many else shares:
            yield self._detail(_share(piece, self.width - _DETAIL))
        if many:
            yield self._detail(_many_towers(shares[_MOST_TOWERS - 1 :]))

    def _repeated(self, sign: str, run: Run[NodeView]) -> Iterator[Text]:
        """A pattern, and how often it stands there if that is more than once."""
        for node in run.pattern:
            yield from self._node(sign, node)
        yield from self._more(run)

    def _more(self, run: Run[NodeView]) -> Iterator[Text]:
        more = run.repeats - 1
        if not more:
            return
        if len(run.pattern) == 1:
            yield self._detail(f"... and {more:,} more like it, up to {run.last[0].name}")
        else:
            yield self._detail(f"... and {more:,} times more these {len(run.pattern)} nodes, up to {run.last[-1].name}")

    def _exchange(self, sign: str, nodes: Sequence[NodeView]) -> Iterator[Text]:
        """All nodes of one exchange, and what it moves."""
        first, facts = nodes[0], nodes[0].exchange
        apart = len(nodes) <= 2
        if apart:
            for node in nodes:
                yield self._line(node.step, sign, node.text, node.location)
        else:
            name = _name(facts)
            for number, (location, run) in enumerate(groupby(nodes, lambda node: node.location)):
                members = list(run)
                title = f"{name}, {counted(len(nodes), 'node')}" if not number else "continued"
                yield self._line(first.step, sign, title, location)
                for line in _wrapped([node.name for node in members], self.width - _DETAIL):
                    yield self._detail(line, style="")
        if facts in self.below:
            yield self._detail("sends the same data as the exchange of this step added below")
            return
        for text in _facts(facts, named=apart):
            yield self._detail(text)

    def _moved(self, moves: Sequence[Move]) -> Iterator[Text]:
        if not moves:
            return
        yield from self._title(f"Moved: {counted(len(moves), 'node')}")
        places = [list(group) for _, group in groupby(moves, lambda move: (move.behind, move.ahead))]
        blocks: list[list[Text]] = []
        for run in fold(places, [_place_shape(together) for together in places]):
            for together in run.pattern:
                blocks += self._moved_together(together)
            if run.repeats > 1:
                last, times = run.last[-1][-1].node.name, run.repeats - 1
                blocks[-1].append(self._indented(_HEADING, f"... and {times:,} times more like this, up to {last}"))
        yield from self._capped(blocks, _MOST_SMALL_BLOCKS)

    def _moved_together(self, moves: Sequence[Move]) -> Iterator[list[Text]]:
        """Nodes that moved to one place."""
        behind, ahead = moves[0].behind, moves[0].ahead
        where = f"between {behind} and {ahead}" if behind and ahead else f"behind {behind}" if behind else f"before {ahead}"
        lines = [self._indented(_HEADING, f"{counted(len(moves), 'node')}, now {where}:")]
        nodes = [move.node for move in moves]
        for run in fold(nodes, [_shape(node) for node in nodes]):
            lines += [self._line(node.step, ">", node.text, node.location) for node in run.pattern]
            lines += self._more(run)
            yield lines
            lines = []

    def _rewired(self, changes: Sequence[Rewiring]) -> Iterator[Text]:
        if not changes:
            return
        yield from self._title(f"Rewired: {counted(len(changes), 'node')}, of those kept or moved")
        why = {change.node.name: _why(change) for change in changes}
        nodes = [change.node for change in changes]
        blocks: list[list[Text]] = []
        for run in fold(nodes, [(_shape(node), _NUMBER.sub("", why[node.name])) for node in nodes]):
            lines = []
            for node in run.pattern:
                lines += [self._line(node.step, "~", node.text, node.location), self._detail(why[node.name])]
            blocks.append([*lines, *self._more(run)])
        yield from self._capped(blocks, _MOST_SMALL_BLOCKS)

    def _legend(self, diff: StageDiff) -> Iterator[Text]:
        shown = (*diff.removed, *diff.added)
        stepped = any(node.step in _STEPS for node in shown if node.step)
        rows = any(isinstance(node.exchange, RowsFacts) for node in shown)
        if stepped or rows:
            yield Text()
        if stepped:
            modules = any(node.step == "f" for node in shown)
            if modules:
                yield Text("a to g: the steps of SPTT, DMT paper section 3.1; f: tower modules, 3.2.", "dim")
            else:
                yield Text("a to g without f, tower modules: the steps of SPTT, DMT paper section 3.1.", "dim")
        if rows:
            yield Text("B: samples on a rank. Bytes: what a rank sends forward to others for one", "dim")
            yield Text("sample on every rank; a..b: smallest and largest over the ranks or towers.", "dim")

    def _capped(self, blocks: Sequence[Sequence[Text]], most: int = _MOST_BLOCKS) -> Iterator[Text]:
        """All blocks, or the first and the last ones and how many lines lie between."""
        if len(blocks) > most:
            kept = most // 2
            middle = sum(map(len, blocks[kept:-kept]))
            gap = self._indented(_HEADING, f"... {middle:,} more lines; the fields of the diff hold every node")
            blocks = [*blocks[:kept], [gap], *blocks[-kept:]]
        for block in blocks:
            yield from block

    def _title(self, text: str) -> Iterator[Text]:
        yield Text()
        yield Text(text, "bold")

    def _line(self, step: str, sign: str, text: str, location: str | None) -> Text:
        """Step, sign and text to the left, the user's line to the right."""
        where = place(location)
        room = self.width - _NODE - (len(where) + 2 if where else 0)
        left = cut(plain(text), room)
        mark = step if len(step) == 1 and step in _STEPS else " "
        line = Text.assemble(f"  {mark}  ", (f"{sign} {left}", _STYLES[sign]))
        if where:
            line.append(" " * (self.width - _NODE - len(left) - len(where)))
            line.append(where, "dim")
        return line

    def _detail(self, text: str, style: str = "dim") -> Text:
        return self._indented(_DETAIL, text, style)

    def _indented(self, indent: int, text: str, style: str = "") -> Text:
        return Text(" " * indent + cut(plain(text), self.width - indent), style)


def _shape(node: NodeView) -> tuple[object, ...]:
    """Equal for nodes that one line of the user's code, or one step of a pass, made many times over."""
    if node.shares or node.exchange:
        return (node.name,)
    return node.kind, node.location, node.step, node.made_by


def _place_shape(moves: Sequence[Move]) -> tuple[object, ...]:
    ends = (_NUMBER.sub("", end) for end in (moves[0].behind, moves[0].ahead))
    return (*ends, *(_shape(move.node) for move in moves))


def _why(change: Rewiring) -> str:
    if not change.reads and not change.instead:
        return "calls another module, or with other arguments"
    reads = listed(change.reads, 50)
    if not change.instead:
        return f"also reads {reads}"
    instead = listed(change.instead, 50)
    return f"reads {reads} instead of {instead}" if change.reads else f"no longer reads {instead}"


def _share(share: Share, width: int) -> str:
    head = f"tower {share.tower} on {ranks(share.ranks)}: {counted(share.columns, 'column')}, "
    return head + _features(share.features, width - len(head))


def _features(names: Sequence[str], width: int) -> str:
    count = counted(len(names), "feature")
    return f"{count}: {listed(names, width - len(count) - 2)}" if names else count


def _many_towers(shares: Sequence[Share]) -> str:
    columns, features = span_of(x.columns for x in shares), span_of(len(x.features) for x in shares)
    head = f"towers {shares[0].tower}..{shares[-1].tower}, {len(shares):,} more"
    return f"{head}: {spanned(columns, 'column')}, {spanned(features, 'feature')} each"


def _name(facts: RowsFacts | IdsFacts | None) -> str:
    if facts is None:
        return "exchange"
    return "AlltoAll of ids" if isinstance(facts, IdsFacts) else EXCHANGE_NAMES[facts.axis]


def _facts(facts: RowsFacts | IdsFacts | None, named: bool) -> Iterator[str]:
    if facts is None:
        return
    among = f"among all {counted(facts.group_size, 'rank')}"
    if isinstance(facts, RowsFacts) and facts.groups > 1:
        among = f"in {counted(facts.groups, 'group')} of {counted(facts.group_size, 'rank')}"
    yield f"{_name(facts) + ' ' if named else ''}{among}, {'crosses hosts' if facts.crosses_hosts else 'inside the host'}"
    if isinstance(facts, IdsFacts):
        sent, received = f"{counted(facts.features, 'feature')}, {facts.dtype}", spanned(facts.features_received, "feature")
    else:
        sent, received = (spanned(columns, "column") for columns in (facts.columns_sent, facts.columns_received))
    pad = max(len(facts.rows_sent), len(facts.rows_received))
    yield f"sends     {facts.rows_sent:<{pad}}  x  {sent}"
    yield f"receives  {facts.rows_received:<{pad}}  x  {received}"
    if isinstance(facts, IdsFacts):
        weights = "4 per weight, " if facts.weighted else ""
        yield f"bytes     by the data: {facts.bytes_per_id} per id, {weights}4 per bag, 24 per rank"
    else:
        yield f"bytes     {size_span(facts.inside)} inside the host, {size_span(facts.across)} across hosts"


def _wrapped(names: Sequence[str], width: int) -> Iterator[str]:
    line = ""
    for number, name in enumerate(names):
        piece = plain(name) + ("," if number < len(names) - 1 else "")
        if line and len(line) + 1 + len(piece) > width:
            yield line
            line = piece
        else:
            line = f"{line} {piece}" if line else piece
    if line:
        yield line
