"""What a sample costs, flat beside towers, as a small table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .text import to_text
from .words import size

if TYPE_CHECKING:
    from ..complexity import Complexity, Cost


def complexity_renderable(found: Complexity) -> RenderableType:
    """Parameters, FLOPs and bytes in the columns flat and towers, and what is counted in them."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "flat", "towers"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True, overflow="crop")
    for (title, *flat), (_, *towers) in zip(_rows(found.flat), _rows(found.towers), strict=True):
        if not flat:
            table.add_row(Text(title, "bold"))
        else:
            table.add_row(f"  {title}", *flat, *towers)
    return Group(Text("Complexity of one sample", "bold"), Padding(table, (0, 0, 0, 2)), *_notes(found))


def complexity_text(found: Complexity) -> str:
    """The table at 80 columns without colour."""
    return to_text(complexity_renderable(found))


def _rows(cost: Cost) -> Iterator[tuple[str, ...]]:
    """Headings, and names with their value."""
    parameters = cost.parameters
    yield ("parameters",)
    yield "dense layers", f"{parameters.dense:,}"
    yield "tower modules", f"{parameters.tower_modules:,}"
    yield "tables", f"{parameters.tables:,}"
    yield ("MFLOPs",)
    yield "forward", _millions(cost.forward_flops)
    yield "training", _millions(cost.training_flops)
    yield ("bytes that a rank sends, rows",)
    yield "inside the host", size(cost.rows.inside_host)
    yield "across hosts", size(cost.rows.across_hosts)
    yield ("bytes that a rank sends, ids",)
    yield "inside the host", size(cost.ids.inside_host)
    yield "across hosts", size(cost.ids.across_hosts)


def _millions(number: float) -> str:
    """Two decimals, and three digits of what is smaller."""
    millions = number / 1e6
    return f"{millions:,.2f}" if millions >= 1 or not millions else f"{millions:.3g}"


def _notes(found: Complexity) -> Iterator[Text]:
    yield Text("  FLOPs of matrix products, as torch counts them, without element-wise work", "dim", overflow="fold")
    yield Text("  training: forward and backward; rows: with their gradients, mean over ranks", "dim", overflow="fold")
    if not found.ids_seen:
        yield Text("  one id per bag is assumed: example_inputs would tell", "dim", overflow="fold")
