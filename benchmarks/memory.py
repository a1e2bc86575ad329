"""No table is copied: what compiling adds to resident memory, whatever the tables weigh."""

from __future__ import annotations

from .process import PeakMemory, in_fresh_process, resident
from .report import against, show

LIMIT = 100.0
TABLES, DIM = 16, 64


def run(quick: bool) -> None:
    gigabytes = 0.1 if quick else 4.0
    rows = []
    for label, size in ((f"{gigabytes:g} GB of tables", gigabytes), ("the same on the meta device", 0.0)):
        rows_per_table = int((size or gigabytes) * 2**30 / (TABLES * DIM * 4))
        before, rise = in_fresh_process(_measure, rows_per_table, "cpu" if size else "meta")
        rows.append((label, f"{before:.0f} MB", against(rise, LIMIT, "MB", 0)))
    show("Memory that towerize adds, 64 x 8 ranks", ("model", "resident before", "peak rise"), rows)


def _measure(rows: int, device: str) -> tuple[float, float]:
    """Resident memory before ``towerize``, with every table's pages in use, and its rise at the peak, in MB."""
    import dmt_compile

    from .models import Wide

    # The first compilation pays for imports, which are no part of what is measured.
    dmt_compile.towerize(Wide(2, 4, 4, "by feature"), dmt_compile.Topology(2, 2))
    model = Wide(TABLES, rows, DIM, "by feature", device)
    if device != "meta":
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
    with PeakMemory() as memory:
        before = resident()
        program = dmt_compile.towerize(model, dmt_compile.Topology(64, 8))
    compiled = dict(program.named_parameters())
    assert all(compiled[name] is parameter for name, parameter in model.named_parameters())
    return before, memory.rise
