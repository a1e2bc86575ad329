"""The doctor's report in colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dmt_compile.doctor import Diagnosis, found_text
from dmt_compile.versions import FITS

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def diagnosis_view(diagnosis: Diagnosis) -> RenderableType:
    """A `Diagnosis` as two tables, the problems, and the commands that repair them.

    Texts are shown as they are: nothing found on the machine is read as console markup.
    """
    head = Text.assemble(("dmt_compile ", "bold"), f"{diagnosis.dmt_compile}, Python {diagnosis.python}\n{diagnosis.platform}")
    packages = _table("package", "fits", "loads", "found")
    for one in diagnosis.packages:
        style = _STYLES[one.state]
        packages.add_row(Text(one.package, style), _yes_no(one.fits), _yes_no(one.loads), Text(found_text(one)))
    checks = _table("check", "state", "seen")
    for check in diagnosis.checks:
        checks.add_row(Text(check.name), Text(check.state, _STYLES[check.state]), Text(check.detail))
    parts: list[RenderableType] = [head, Text(), packages, Text(), checks, Text()]
    parts.append(Text(diagnosis.verdict, "green" if diagnosis.ok else "bold red"))
    parts += [_item("-", problem) for problem in diagnosis.problems]
    if diagnosis.fixes:
        parts += [Text(), Text("Releases that fit together:", "bold")]
        parts += [_item(" ", str(fit)) for fit in FITS]
        parts += [Text(), Text("To repair, run these and start Python again:", "bold")]
        # Each is shorter than a line of 80 columns; folded, never cropped, where the terminal is narrower.
        parts += [Text(f"  {command}", "cyan", overflow="fold") for command in diagnosis.fixes]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        last = number == len(columns) - 1
        table.add_column(name, header_style="bold", overflow="fold", no_wrap=not last)
    return table


def _item(mark: str, text: str) -> Table:
    """`text` behind a mark, its later lines indented."""
    grid = Table.grid(padding=(0, 1, 0, 1))
    grid.add_row(Text(mark), Text(text, overflow="fold"))
    return grid


def _yes_no(value: bool | None) -> Text:
    if value is None:
        return Text("-", "dim")
    return Text("yes", "green") if value else Text("no", "bold red")
