"""``torch.compile`` on one rank: backend "dmt" beside its inner backend, inductor, in turn in one run."""

from __future__ import annotations

import statistics
import time
import warnings

import torch
from torch import nn

from .report import show

FIELDS, ROWS, DIM, BATCH = 26, 20_000, 32, 512
STEP, COMPILE = 1.03, 1.3


class Wide(nn.Module):
    """A plain PyTorch DLRM without its triangle: a table for each field, a bottom and a top MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(ROWS, DIM) for _ in range(FIELDS)])
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((FIELDS + 1) * DIM, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *rows], dim=1))


def run(quick: bool) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, 13), torch.randint(0, ROWS, (BATCH, FIELDS))
    compiled = {name: torch.compile(model, backend=name, fullgraph=True) for name in ("inductor", "dmt")}

    def step(name: str) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        compiled[name](*batch).mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    # The first compilation of all pays for imports and tools.
    _first(step, "inductor")
    rounds = 1 if quick else 3
    # The second of two finds kernels that the first has left in inductor's cache.
    with torch._inductor.config.patch(force_disable_caches=True):
        firsts = [{name: _first(step, name) for name in compiled} for _ in range(rounds)]
        torch._dynamo.reset()
        for name in compiled:
            step(name)
    pairs = 20 if quick else 200
    ratios, own = [], []
    for number in range(pairs):
        order = ("inductor", "dmt") if number % 2 else ("dmt", "inductor")
        seconds = {name: step(name) for name in order}
        own.append(seconds["inductor"])
        ratios.append(seconds["dmt"] / seconds["inductor"])
    steps, compiles = statistics.median(ratios), statistics.median(one["dmt"] / one["inductor"] for one in firsts)
    first = statistics.median(one["inductor"] for one in firsts)
    show(
        f"torch.compile on one rank, {FIELDS} tables of {ROWS:,} x {DIM}, batch {BATCH} (medians; what is compared is in turn)",
        ("", "inductor", "dmt / inductor", "target"),
        [
            ("step", f"{statistics.median(own) * 1e3:.2f} ms", f"{steps:.3f}", "ok" if steps <= STEP else f"OVER {STEP}"),
            ("first call", f"{first:.1f} s", f"{compiles:.3f}", "ok" if compiles <= COMPILE else f"OVER {COMPILE}"),
        ],
        "A step is forward, backward and SGD. On one rank nothing is exchanged: the same lookups, tower by tower.",
    )


def _first(step: object, name: str) -> float:
    torch._dynamo.reset()
    assert callable(step)
    seconds: float = step(name)
    return seconds


__all__ = ["run"]
