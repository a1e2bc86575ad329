"""Time and memory of ``towerize``: plan to lowered stage, with all invariants checked, as tables and ranks grow."""

from __future__ import annotations

import time
from dataclasses import dataclass

import dmt_compile

from .models import Read, Wide
from .process import PeakMemory, in_fresh_process
from .report import against, show

# (tables, hosts): (seconds, MB beyond the model); None where only growth is looked at.
TARGETS: dict[tuple[int, int], tuple[float, float | None]] = {(1_000, 64): (3.0, None), (10_000, 512): (40.0, 1024.0)}
RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Case:
    tables: int
    hosts: int
    read: Read


def run(quick: bool) -> None:
    sizes = [Case(t, 64, "values") for t in (500, 1_000, 2_000, 4_000)]
    ranks = [Case(1_000, h, "values") for h in (1, 8, 64, 512)]
    largest = [Case(10_000, 512, read) for read in ("values", "by feature")]
    headline = [Case(1_000, 64, read) for read in ("values", "by feature", "by collection")]

    rows = []
    for case in headline if quick else headline + largest:
        seconds, _, memory = in_fresh_process(_measure, case)
        limit, memory_limit = TARGETS[case.tables, case.hosts]
        rows.append(
            (
                f"{case.tables:,} tables, {case.hosts} x {RANKS_PER_HOST} ranks, read {case.read}",
                against(seconds, limit, "s", 2),
                f"{memory:.0f} MB" if memory_limit is None else against(memory, memory_limit, "MB", 0),
            )
        )
    show("Compile time, first compilation in a process", ("model", "towerize", "peak memory"), rows)

    rows = []
    sizes = sizes[:2] if quick else sizes
    for case, seconds in zip(sizes, in_fresh_process(_fastest, sizes), strict=True):
        rows.append((f"{case.tables:,}", f"{seconds:.2f} s", f"{seconds / case.tables * 1e3:.3f} ms"))
    show("Growth with tables, 64 x 8 ranks, least of three (target: about linear)", ("tables", "CPU time", "per table"), rows)

    rows = []
    ranks = ranks[:3] if quick else ranks
    times = in_fresh_process(_fastest, ranks)
    for case, seconds in zip(ranks, times, strict=True):
        rows.append((f"{case.hosts} x {RANKS_PER_HOST}", f"{seconds:.2f} s", f"{seconds / times[0]:.2f}"))
    show("Growth with ranks, 1,000 tables, least of three (target: hardly any)", ("ranks", "CPU time", "ratio"), rows)


def _fastest(cases: list[Case]) -> list[float]:
    """CPU seconds of ``towerize``, the least of three rounds over all cases: what else the machine does only ever adds."""
    rounds = [[_measure(case)[1] for case in cases] for _ in range(3)]
    return [min(times) for times in zip(*rounds, strict=True)]


def _measure(case: Case) -> tuple[float, float, float]:
    """Seconds and CPU seconds of ``towerize`` in this process, and the rise of resident memory in MB."""
    model = Wide(case.tables, 100, 8, case.read)
    with PeakMemory() as memory:
        start, cpu_start = time.perf_counter(), time.process_time()
        dmt_compile.towerize(model, dmt_compile.Topology(case.hosts, RANKS_PER_HOST))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return seconds, cpu_seconds, memory.rise
