"""One device: the towers stage beside the flat model, over the same tables, in turn in one run."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import dmt_compile

from .models import batch, dlrm
from .report import show

TABLES, ROWS, DIM, TOWERS = 26, 20_000, 64, 2
TARGET = 1.03


@dataclass(frozen=True)
class Case:
    batch: int
    ids: int
    rows: int
    pairs: int


CASES = (Case(1024, 1, ROWS, 24), Case(1024, 4, ROWS, 24), Case(128, 1, ROWS, 30), Case(128, 4, ROWS, 30), Case(128, 1, 100, 300))


def run(quick: bool) -> None:
    warnings.filterwarnings("ignore")
    threads = torch.get_num_threads()
    # With several threads every operator waits for the slowest one, and on a busy machine that is all that would be measured.
    torch.set_num_threads(1)
    try:
        rows = [_row(case, max(case.pairs // 4, 8) if quick else case.pairs) for case in (CASES[-2:] if quick else CASES)]
    finally:
        torch.set_num_threads(threads)
    show(
        f"One-device overhead, DLRM 512-256-{DIM} / 512-256-1, {TABLES} tables, one thread "
        f"(target: step ratio <= {TARGET}; medians of paired runs)",
        ("batch", "ids per bag", "rows", "flat forward", "ratio", "flat step", "ratio", "target"),
        rows,
        "A step is forward, backward with dense table gradients, and SGD; forward runs without gradients. Tables of 100 rows weigh "
        "nothing: there the cost of each operator shows.",
    )


def _row(case: Case, pairs: int) -> tuple[object, ...]:
    torch.manual_seed(0)
    model = dlrm(TABLES, case.rows, DIM)
    program = dmt_compile.towerize(model, dmt_compile.Topology(TOWERS, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)

    def forward(module: nn.Module) -> float:
        # A new batch each time, as a data loader hands them out: a KeyedJaggedTensor keeps its offsets once computed.
        dense, ids = batch(TABLES, case.rows, case.batch, case.ids, generator)
        start = time.perf_counter()
        with torch.no_grad():
            module(dense, ids)
        return time.perf_counter() - start

    def step(module: nn.Module) -> float:
        dense, ids = batch(TABLES, case.rows, case.batch, case.ids, generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        module(dense, ids).mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    flat_forward, forward_ratio = _paired(forward, model, program, 2 * pairs)
    flat_step, step_ratio = _paired(step, model, program, pairs)
    verdict = "ok" if step_ratio <= TARGET else "OVER"
    return (
        str(case.batch),
        case.ids,
        f"{case.rows:,}",
        f"{flat_forward * 1e3:.2f} ms",
        f"{forward_ratio:.3f}",
        f"{flat_step * 1e3:.2f} ms",
        f"{step_ratio:.3f}",
        verdict,
    )


def _paired(measure: Callable[[nn.Module], float], flat: nn.Module, program: nn.Module, pairs: int) -> tuple[float, float]:
    """The flat model's median time, and the median of the ratios of neighbours; which of the two is first alternates."""
    for module in (flat, program) * 3:
        measure(module)
    times, ratios = [], []
    for number in range(pairs):
        if number % 2:
            after, before = measure(program), measure(flat)
        else:
            before, after = measure(flat), measure(program)
        times.append(before)
        ratios.append(after / before)
    return statistics.median(times), statistics.median(ratios)
