"""A compiled program at a glance: towers, balance, lookups, what was kept whole, and bytes per sample, classic against SPTT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..exchange import Exchange, IdExchange
from ..graphs import attribute_of
from ..lookups import LookupOutput, LookupSet
from ..runtime.pooled import ExchangeRows
from .facts import EXCHANGE_NAMES, ids_facts
from .interactions import interaction_lines
from .text import WIDTH, to_text
from .towers import tower_lines
from .words import counted, cut, listed, place, plain, ranks, short_places, size, size_span, span, span_of

if TYPE_CHECKING:
    from ..program import TowerProgram
    from ..stage import Stage

_MOST_TOWERS = 8
_MOST_LOOKUPS = 6
_MOST_REASONS = 4
_REASON = 200
_NAMES = 21


def summary_renderable(program: TowerProgram) -> RenderableType:
    """The summary as a rich renderable; its length is bounded whatever the size of the model."""
    return Group(*_parts(program))


def summary_text(program: TowerProgram) -> str:
    """The summary at 80 columns without colour."""
    return to_text(summary_renderable(program))


def _parts(program: TowerProgram) -> Iterator[RenderableType]:
    plan, lookups, topology = program.plan, program.lookups, program.topology
    model = type(program.stages["flat"].root).__name__
    placed = f"{counted(topology.hosts, 'host')} x {counted(topology.ranks_per_host, 'rank')}"
    if lookups.lookups:
        yield _line(f"{model}: {counted(len(plan.towers), 'tower')} on {placed}", "bold")
        yield _line(
            f"{counted(len(lookups.lookups), 'lookup')}, {counted(len(lookups.tables), 'table')} "
            f"({size(sum(table.bytes for table in lookups.tables))}), {counted(lookups.width, 'column')} per sample"
        )
        yield _line(f"plan {plan.hash[:12]}, {plan.partition}")
        yield _title("Towers")
        yield _towers(program)
        yield Text()
        yield from _balance(program)
        yield _title("Lookups found")
        yield from _lookups(program)
    else:
        yield _line(f"{model}: left flat on {placed}, no table is spread", "bold")
        yield _line("every rank holds the whole model; gradients are averaged over all ranks")
    yield _title("Interactions found")
    yield from (Text(line, no_wrap=True) for line in interaction_lines(program.interactions))
    if program.tower_model is not None:
        yield _title("Tower modules")
        yield from (_line(f"  {line}") for line in tower_lines(program))
    if program.replicated:
        yield from _replicated(program)
    if program.leaves:
        yield _title(f"Kept whole: {counted(len(program.leaves), 'submodule')} that could not be traced")
        yield from _reasons({path: ("", reason) for path, reason in program.leaves.items()}, "program.leaves")
    if lookups.lookups:
        yield _title("Bytes that a rank sends forward for one sample on every rank")
        yield _traffic(program)
        yield from _ids(program)
    yield _title("Stages")
    yield _line("  " + ", ".join(f"{name} {len(stage.graph.nodes):,}" for name, stage in program.stages.items()) + " nodes")


def _towers(program: TowerProgram) -> RenderableType:
    plan = program.plan
    table = _table("tower", "ranks", "tables", "size", "columns", "features", left=(1, 5))
    shown = plan.towers if len(plan.towers) <= _MOST_TOWERS else plan.towers[: _MOST_TOWERS - 2]
    counts, sizes, widths = _by_tower(program)
    for index, tower in enumerate(shown):
        names = f"{len(tower.features):,}: {listed(tower.features, _NAMES)}" if tower.features else "none"
        on = ranks(tower.ranks).split(maxsplit=1)[1]
        table.add_row(str(index), on, f"{counts[index]:,}", size(sizes[index]), f"{widths[index]:,}", Text(names))
    rest = range(len(shown), len(plan.towers))
    if rest:
        served = span_of(len(plan.towers[i].features) for i in rest)
        number, held, columns = (span_of(values[i] for i in rest) for values in (counts, sizes, widths))
        label = f"..{rest[-1]:,}"
        table.add_row(label, f"{len(rest):,} more", span(number), size_span(held), span(columns), f"{span(served)} each")
    return _inset(table)


def _by_tower(program: TowerProgram) -> tuple[list[int], list[int], list[int]]:
    """Tables, bytes of tables, and pooled columns of each tower."""
    lookups = program.lookups
    counts, sizes, widths = [], [], []
    for tower in program.plan.towers:
        owned = [lookups.table[name] for names in tower.tables for name in names]
        counts.append(len(owned))
        sizes.append(sum(table.bytes for table in owned))
        widths.append(sum(lookups.lookup[name].dim for name in tower.features))
    return counts, sizes, widths


def _balance(program: TowerProgram) -> Iterator[RenderableType]:
    lookups = program.lookups
    _, towers, widths = _by_tower(program)
    owned = [sum(lookups.table[name].bytes for name in names) for names in program.plan.tables_of_rank]
    columns = [sum(lookup.dim for lookup in served) for served in program.plan.lookups_of_rank(lookups)]
    table = _table("", "bytes of tables", "max/mean", "columns", "max/mean", left=(0,))
    for name, held, wide in (("per tower", towers, widths), ("per rank", owned, columns)):
        table.add_row(name, size_span(span_of(held)), _ratio(held), span(span_of(wide)), _ratio(wide))
    yield _inset(table)
    idle = sum(not names for names in program.plan.tables_of_rank)
    if idle:
        yield _line(f"  {counted(idle, 'rank')} without a table", "yellow")


def _ratio(values: Sequence[int]) -> str:
    mean = sum(values) / len(values)
    return f"{max(values) / mean:.2f}" if mean else "-"


def _replicated(program: TowerProgram) -> Iterator[RenderableType]:
    """Tables that are no lookups for the exchanges: why, and what that costs."""
    flat = program.stages["flat"]
    tables: dict[str, Tensor] = {name: attribute_of(flat.graph_module, name) for name in program.replicated}
    held = {name: table.numel() * table.element_size() for name, table in tables.items()}
    trained = sum(held[name] for name, table in tables.items() if table.requires_grad)
    yield _title(f"Replicated: {counted(len(tables), 'table')} on every rank")
    cost = f"at most {size(trained)} of gradients all-reduced in every step" if trained else "frozen, so no gradients"
    yield _line(f"  {size(sum(held.values()))} on each of {counted(program.topology.world_size, 'rank')}; {cost}")
    yield from _reasons({name: (size(held[name]), reason) for name, reason in program.replicated.items()}, "program.replicated")


def _reasons(entries: Mapping[str, tuple[str, str]], everything: str) -> Iterator[RenderableType]:
    """Names, each with a remark and a reason."""
    for name, (remark, reason) in list(entries.items())[:_MOST_REASONS]:
        yield _line(f"  {name}{', ' if remark else ''}{remark}")
        yield Padding(_line(cut(short_places(reason), _REASON)), (0, 0, 0, 4))
    if len(entries) > _MOST_REASONS:
        yield _line(f"  ... and {len(entries) - _MOST_REASONS:,} more ({everything})")


def _lookups(program: TowerProgram) -> Iterator[RenderableType]:
    """One row for all that are written in the same way in the same line."""
    lookups = program.lookups
    groups: dict[tuple[object, str], list[LookupOutput]] = {}
    for output in lookups.outputs:
        style = _style(lookups, output)
        key = output.location if output.location and not style.startswith("keyed") else output.node
        groups.setdefault((key, style), []).append(output)
    rows = []
    for (_, style), outputs in list(groups.items())[:_MOST_LOOKUPS]:
        served = [lookups.lookup[name] for output in outputs for name in output.lookups]
        names = [output.node for output in outputs] if style.startswith("keyed") else [x.name for x in served]
        number = f"{len(served):,}{' weighted' if any(x.weighted for x in served) else ''}"
        rows.append((names, number, f"{sum(x.dim for x in served):,}", style, place(outputs[0].location)))
    titles = ("lookup", "number", "columns", "ids: result", "in your code")
    table = _table(*titles, left=(0, 3, 4))
    others = list(zip(titles, *((None, *cells) for _, *cells in rows), strict=True))[1:]
    room = WIDTH - 10 - sum(max(len(str(cell)) for cell in cells) for cells in others)
    for names, *cells in rows:
        node = listed(names, room) if len(names) > 1 else plain(names[0])
        # The end of a long name says more than its beginning.
        table.add_row(Text(node if len(node) <= room else f"...{node[3 - room :]}"), *map(Text, cells))
    yield _inset(table)
    if len(groups) > _MOST_LOOKUPS:
        left = sum(len(outputs) for outputs in list(groups.values())[_MOST_LOOKUPS:])
        yield _line(f"  ... and {left:,} more (program.lookups.outputs)")
    yield from _rounds(lookups)
    for parameter, why in list(program.whole.items())[:_MOST_REASONS]:
        yield _line(f"  {parameter} is not taken apart by field: {why}", "yellow")


def _style(lookups: LookupSet, output: LookupOutput) -> str:
    """How the ids of an output are given, and what becomes of them: "keyed: sum", "5 ids: rows", "offsets: mean"."""
    served = [lookups.lookup[name] for name in output.lookups]
    source = lookups.sources[served[0].source]
    result = "/".join(dict.fromkeys(x.pooling for x in served))
    if source.unit != "sample":
        return f"any {source.unit}s: {result}"
    if source.form == "fixed":
        ids = counted(source.count, "id") if source.count else "any ids"
        return f"{ids}: {'row' if result == 'rows' and source.count == 1 else result}"
    return f"{source.form}: {result}"


def _rounds(lookups: LookupSet) -> Iterator[RenderableType]:
    """Which lookups are served apart from the others."""
    if len(lookups.rounds) == 1:
        return
    yield _line(f"  {len(lookups.rounds)} rounds of exchanges, one after the other:")
    for number, one in enumerate(lookups.rounds):
        per = "" if one.unit == "sample" else f", a row per {one.unit}"
        names = listed([x.name for x in one.lookups], WIDTH - 24 - len(per))
        yield _line(f"    {number + 1}: {names}{per}")


def _traffic(program: TowerProgram) -> RenderableType:
    table = _table("", "AlltoAll", "ranks", "inside the host", "across hosts", left=(0, 1, 3, 4))
    for name in _compared(program):
        total = [(0, 0)] * program.topology.world_size
        found: dict[tuple[str, str], list[Exchange]] = {}
        for module in _modules(program.stages[name]):
            if isinstance(module, ExchangeRows):
                found.setdefault((module.exchange.unit, module.exchange.axis), []).append(module.exchange)
        per_sample = 0
        for number, ((unit, axis), exchanges) in enumerate(sorted(found.items(), key=lambda item: item[0][0] != "sample")):
            traffic = _added([exchange.traffic_by_rank(program.topology) for exchange in exchanges])
            label = EXCHANGE_NAMES[axis].removesuffix(" AlltoAll") + ("" if unit == "sample" else f", per {unit}")
            if unit == "sample":
                per_sample += 1
                total = _added([total, traffic])
            elif per_sample > 1:
                table.add_row("", "together", "", *_mean_max(total))
                per_sample = 0
            table.add_row("" if number else name, label, f"{len(exchanges[0].members(0)):,}", *_mean_max(traffic))
        if per_sample > 1:
            table.add_row("", "together", "", *_mean_max(total))
    return _inset(table)


def _compared(program: TowerProgram) -> list[str]:
    """The stages whose exchanges are told apart."""
    return [name for name in ("classic", "sptt", "modules") if name in program.stages]


def _added(parts: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [(sum(inside for inside, _ in own), sum(across for _, across in own)) for own in zip(*parts, strict=True)]


def _mean_max(traffic: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The bytes inside the host, then those across hosts."""
    for values in zip(*traffic, strict=True):
        mean, most = size(sum(values) / len(values)), size(max(values))
        yield mean if mean == most else f"{mean}, max {most}"


def _ids(program: TowerProgram) -> Iterator[Text]:
    exchange = next((e for e in map(_id_exchange, _modules(program.stages["sptt"])) if e is not None), None)
    if exchange is None:
        return
    facts = ids_facts(exchange, program.topology)
    weights = ", 4 per weight" if facts.weighted else ""
    alike = "both" if len(_compared(program)) == 2 else "all"
    yield _line(f"  ids not counted, alike in {alike}: {facts.bytes_per_id} per id{weights}, 4 per bag, 24 per rank", "dim")


def _id_exchange(module: object) -> IdExchange | None:
    record = getattr(module, "exchange", None)
    return record if isinstance(record, IdExchange) else None


def _modules(stage: Stage) -> Iterator[object]:
    return (stage.module(node) for node in stage.graph.nodes if node.op == "call_module")


def _table(*columns: str, left: Sequence[int]) -> Table:
    """A table without lines whose rows keep to one line each: what may be long is folded before it is put in."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number in left else "right", no_wrap=True, overflow="crop")
    return table


def _inset(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2))


def _title(text: str) -> Text:
    return Text(f"\n{plain(text)}", "bold", overflow="fold")


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style, overflow="fold")
