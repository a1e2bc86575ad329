"""The models behind the golden files. Golden files show lines of this file: after a change run `UPDATE_GOLDENS=1 pytest`."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig


def tables(count: int, dim: int = 8) -> EmbeddingBagCollection:
    """``count`` tables t0, t1, ... of one feature f0, f1, ... each, on the meta device."""
    configs = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=100 + 10 * i, feature_names=[f"f{i}"])
        for i in range(count)
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def dlrm() -> DLRM:
    """TorchRec's own model over five tables."""
    return DLRM(tables(5), 4, [8, 8], [8, 1])


class Wide(nn.Module):
    """A user's own model: one column block after another is read, scaled and kept."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.features = [f"f{i}" for i in range(count)]
        self.tables = tables(count)
        self.top = nn.Linear(8 * count + 4, 1)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.tables(sparse)
        parts = [dense.relu()]
        for feature in self.features:
            block = pooled[feature]
            parts.append(block.tanh())
        return self.top(torch.cat(parts, dim=1))


def wide() -> Wide:
    """A user's own model over 200 tables."""
    return Wide(200)


class Kept(nn.Module):
    """A layer that branches on values: it cannot be traced and is kept whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class Branching(nn.Module):
    """A user's own model with a submodule that is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = tables(3)
        self.kept = Kept()

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return self.kept(self.tables(sparse).values())


def branching() -> Branching:
    """A model with a submodule that is kept whole."""
    return Branching()
