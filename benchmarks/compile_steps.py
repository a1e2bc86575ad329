"""Where compilation spends its time: capture, plan, every pass, and the layout check by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dmt_compile import Topology
from dmt_compile.analysis import analyse
from dmt_compile.capture import capture
from dmt_compile.partition import make_plan
from dmt_compile.passes.pipeline import PIPELINE
from dmt_compile.stage import Stage
from dmt_compile.verify.layout import check_layout

from .models import Wide
from .report import show

R = TypeVar("R")
CASES = ((1_000, 64), (1_000, 512), (10_000, 512))


def run(quick: bool) -> None:
    columns = [_steps(tables, hosts) for tables, hosts in (CASES[:1] if quick else CASES)]
    labels = [f"{tables:,} tables, {hosts} x 8" for tables, hosts in CASES]
    total = [sum(s for name, s in column.items() if not name.startswith(" ")) for column in columns]
    rows = [(name, *(f"{column[name] * 1e3:.0f} ms" for column in columns)) for name in columns[0]]
    rows.append(("total", *(f"{seconds * 1e3:.0f} ms" for seconds in total)))
    show(
        "Compile steps, features read one by one (indented: part of the step above, timed again by itself)",
        ("step", *labels[: len(columns)]),
        rows,
    )


def _steps(tables: int, hosts: int) -> dict[str, float]:
    spent: dict[str, float] = {}

    def timed(name: str, call: Callable[[], R]) -> R:
        start = time.perf_counter()
        result = call()
        spent[name] = time.perf_counter() - start
        return result

    model = Wide(tables, 100, 8, "by feature")
    captured = timed("capture", lambda: capture(model))
    lookups = timed("find lookups", lambda: analyse(captured, None))[captured.root.training].lookups
    plan = timed("plan", lambda: make_plan(lookups, Topology(hosts, 8)))
    stage = Stage("flat", captured.flat, captured.root, lookups, plan)
    for graph_pass in PIPELINE:
        before = stage
        stage = timed(f"pass {graph_pass.name}", lambda p=graph_pass, s=before: p.apply(s))  # type: ignore[misc]
        if check_layout in graph_pass.ensures:
            timed(f"  layout check of {stage.name}", lambda s=stage: check_layout(s))  # type: ignore[misc]
    return spent
