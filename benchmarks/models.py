"""Models and batches that the benchmarks compile and run."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Read = Literal["values", "by feature", "by collection"]


def collection(tables: int, rows: int, dim: int, device: torch.device | str = "cpu", first: int = 0) -> EmbeddingBagCollection:
    """``tables`` tables of ``rows`` x ``dim``, each read by one feature; ``first`` is the number of the first."""
    return EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{i}"])
            for i in range(first, first + tables)
        ],
    )


class Wide(nn.Module):
    """Many tables before a small dense part.

    ``read`` "values" takes the pooled columns as one tensor, so the graph's size does not depend on the number of tables;
    "by feature" adds one node per feature; "by collection" puts every table into a collection of its own. No constant grows
    with the square of the tables, as the index in DLRM's interaction does.
    """

    def __init__(self, tables: int, rows: int, dim: int, read: Read, device: torch.device | str = "meta") -> None:
        super().__init__()
        self.tables = tables
        self.read = read
        each = tables if read != "by collection" else 1
        self.lookups = nn.ModuleList(collection(each, rows, dim, device, first) for first in range(0, tables, each))
        self.over = nn.Sequential(nn.Linear(tables * dim, 16, device=device), nn.ReLU(), nn.Linear(16, 1, device=device))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled, *others = [lookup(ids) for lookup in self.lookups]
        if self.read == "values":
            columns = pooled.values()
        elif self.read == "by feature":
            columns = torch.cat([pooled[f"f{i}"] for i in range(self.tables)], dim=1)
        else:
            columns = torch.cat([one.values() for one in (pooled, *others)], dim=1)
        out: torch.Tensor = self.over(columns)
        return out


DENSE_FEATURES = 13


def dlrm(tables: int, rows: int, dim: int) -> DLRM:
    """A DLRM with the layer sizes that TorchRec's and MLPerf's examples use."""
    return DLRM(collection(tables, rows, dim), DENSE_FEATURES, [512, 256, dim], [512, 256, 1])


def batch(
    tables: int, rows: int, size: int, ids_per_bag: int, generator: torch.Generator
) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Dense features and ids, ``ids_per_bag`` for every feature and sample."""
    lengths = torch.full((tables * size,), ids_per_bag, dtype=torch.int64)
    values = torch.randint(0, rows, (tables * size * ids_per_bag,), generator=generator)
    keys = [f"f{i}" for i in range(tables)]
    return torch.randn(size, DENSE_FEATURES, generator=generator), KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
