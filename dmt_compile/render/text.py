"""Renderables as plain text of a fixed width."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 80


def to_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """Lines of at most ``width`` columns, no colour, no trailing blanks: the same in every terminal."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False, highlight=False
    )
    console.print(renderable)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
