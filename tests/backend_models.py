"""What tests of ``torch.compile(model, backend="dmt")`` share."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dmt_compile.backend.staging import counted


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def loss(value: Any) -> torch.Tensor:
    """The mean loss of a batch; zero, with gradients of zeros, for an empty one."""
    parts = [t.float().square().mean() if t.numel() else t.float().sum() for t in tensors(value) if t.is_floating_point()]
    return torch.stack(parts).sum()


def fresh() -> None:
    torch._dynamo.reset()
    counted.rewritten = counted.others = 0
    warnings.simplefilter("ignore")


class Mlp(nn.Module):
    """A bottom MLP that needs no lookup, beside tables of two widths and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(20, 4) for _ in range(3)])
        self.bag = nn.EmbeddingBag(30, 4, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.top = nn.Linear(20, 1)

    def forward(self, dense: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = [table(x[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), self.bag(ids, offsets), *rows], dim=1))


def batch(size: int, seed: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (size,), generator=draw)
    offsets = (lengths.cumsum(0) - lengths).long()
    ids = torch.randint(0, 30, (int(lengths.sum()),), generator=draw)
    return torch.randn(size, 3, generator=draw), torch.randint(0, 20, (size, 3), generator=draw), ids, offsets


def seeded() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


class Breaking(Mlp):
    """Python in the middle: lookups in the first graph, layers in another."""

    def forward(self, dense: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = [table(x[:, i]) for i, table in enumerate(self.tables)]
        torch._dynamo.graph_break()
        return self.top(torch.cat([self.bottom(dense), self.bag(ids, offsets), *rows], dim=1))
