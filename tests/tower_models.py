"""Models for tower modules, and the modules that their towers get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models
import torch
from torch import nn

from dmt_compile import Topology, TowerProgram, towerize
from dmt_compile.towers.modules import CrossTower, DLRMTower, PassThrough

ROWS = (5, 9, 4, 7, 6)
DIM = 8
DENSE = 4
LENGTH = 3


class Dot(nn.Module):
    """A small DLRM in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 6), nn.Tanh(), nn.Linear(6, DIM))
        n = len(ROWS) + 1
        self.top = nn.Sequential(nn.Linear(DIM + n * (n - 1) // 2, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(d)
        vectors = torch.cat([dense] + [table(x[:, i]) for i, table in enumerate(self.tables)], dim=1).view(-1, len(ROWS) + 1, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = torch.tril_indices(len(ROWS) + 1, len(ROWS) + 1, offset=-1)
        return self.top(torch.cat([dense, products[:, i, j]], dim=1))


class ByMode(Dot):
    """Another graph in training than in evaluation."""

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x, d)
        return logits if self.training else logits.sigmoid()


class Beside(nn.Module):
    """Columns that no tower takes: first-order weights, the rows of a history, and a vector that is read as it is too."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.first = nn.ModuleList(nn.Embedding(rows, 1) for rows in ROWS)
        self.items = nn.Embedding(11, DIM)
        self.top = nn.Sequential(nn.Linear(len(ROWS) * DIM, 6), nn.Tanh(), nn.Linear(6, 1))
        self.behind = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        vectors = [table(x[:, i]) for i, table in enumerate(self.tables)]
        linear = torch.cat([table(x[:, i]) for i, table in enumerate(self.first)], dim=1).sum(1, keepdim=True)
        items = self.items(history)
        attended = (torch.softmax((items * vectors[0].unsqueeze(1)).sum(2), dim=1).unsqueeze(2) * items).sum(1)
        return self.top(torch.cat(vectors, dim=1)) + linear + self.behind(attended)


class UserTower(nn.Module):
    """A user's own tower module, with dropout, a buffer and a parameter that is used twice."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.vectors, self.width = features, width
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.again = self.mix
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.again(torch.tanh(self.mix(self.norm(x)))) + self.shift)


def _ids(batch: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, rows, (batch,), generator=draw) for rows in ROWS], dim=1)


def _dot_inputs(batch: int, seed: int) -> tuple[Any, ...]:
    return _ids(batch, seed), torch.randn(batch, DENSE, generator=torch.Generator().manual_seed(seed + 1))


def _beside_inputs(batch: int, seed: int) -> tuple[Any, ...]:
    return _ids(batch, seed), torch.randint(0, 11, (batch, LENGTH), generator=torch.Generator().manual_seed(seed + 1))


@dataclass(frozen=True)
class Case:
    """``inputs(batch, seed)`` gives the positional arguments."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Any, ...]]

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()


CASES = {
    "dot": Case(Dot, _dot_inputs),
    "by mode": Case(ByMode, _dot_inputs),
    "beside": Case(Beside, _beside_inputs),
    "torchrec": Case(lambda: models.torchrec_model("DLRM"), lambda batch, seed: models.torchrec_inputs(batch, seed)),
    "torchrec dcn": Case(lambda: models.torchrec_model("DLRM_DCN"), lambda batch, seed: models.torchrec_inputs(batch, seed)),
}

TOWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "each": (DLRMTower(c=1, p=0, dim=4), {}),
    "together": (DLRMTower(c=0, p=2, dim=4), {}),
    "both": (DLRMTower(c=1, p=1, dim=4), {}),
    "cross": (CrossTower(dim=6, layers=2, rank=3), {}),
    "pass": (PassThrough(), {}),
    "list": ([DLRMTower(c=1, p=0, dim=8), PassThrough()], {}),
    "some": ({1: DLRMTower(c=1, p=0, dim=8)}, {}),
    "expanded": (DLRMTower(c=1, p=1, dim=3), {"expand": True}),
    "own": (UserTower, {}),
}
"""What ``tower_module`` is, and further options."""


def program(case: str, grid: tuple[int, int, int], tower: str, **options: Any) -> TowerProgram:
    """A case compiled for (hosts, ranks per host, towers); the same values in every process."""
    module, more = TOWERS[tower]
    hosts, local, towers = grid
    model = CASES[case].build()
    example = CASES[case].inputs(6, 7)
    return towerize(model, Topology(hosts, local), towers=towers, example_inputs=example, tower_module=module, **more, **options)
