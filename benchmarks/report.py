"""Plain tables on standard output."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch


def machine() -> str:
    """What the figures were taken on."""
    load = os.getloadavg()[0]
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs ({platform.machine()}), "
        f"load {load:.1f} at the start"
    )


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> None:
    """Print one table; the first column is text, the others are aligned to the right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    print(f"\n{title}")
    for number, line in enumerate(cells):
        first, *rest = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        print("  " + "  ".join([first, *rest]).rstrip(), flush=True)
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    if note:
        print(f"  {note}", flush=True)


def against(value: float, limit: float, unit: str, digits: int = 1) -> str:
    """A figure beside the target it is held to."""
    verdict = "ok" if value <= limit else "OVER"
    return f"{value:.{digits}f} {unit} (target < {limit:g} {unit}: {verdict})"
