"""Three plain PyTorch recommenders in three styles, compiled into towers and verified, in one command.

    python examples/plain_models.py

None of them knows of towers: each is an ordinary ``nn.Module``, and one batch tells the compiler what its ids look like.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import dmt_compile

HOSTS, RANKS_PER_HOST, BATCH = 2, 3, 64
ROWS = (40, 60, 25, 90, 15, 30)


class WideAndDeep(nn.Module):
    """A table per field, twice: vectors for the deep part, and one number each for the wide part."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList([nn.Embedding(rows, 8) for rows in ROWS])
        self.wide = nn.ModuleList([nn.Embedding(rows, 1) for rows in ROWS])
        self.mlp = nn.Sequential(nn.Linear(8 * len(ROWS) + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        deep = [table(ids[:, field]) for field, table in enumerate(self.deep)]
        wide = [table(ids[:, field]) for field, table in enumerate(self.wide)]
        return (self.mlp(torch.cat([*deep, dense], dim=1)) + torch.stack(wide).sum(0)).squeeze(1)


class FactorisationMachine(nn.Module):
    """All fields in one table, each field's ids shifted by where its rows begin."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.bias = nn.Embedding(sum(ROWS), 8), nn.Embedding(sum(ROWS), 1)
        self.register_buffer("first", torch.tensor(ROWS).cumsum(0) - torch.tensor(ROWS))
        self.mlp = nn.Sequential(nn.Linear(8 * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids + self.first
        vectors = self.vectors(ids)
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        return (pairs + self.bias(ids).sum(1) + self.mlp(vectors.flatten(1))).squeeze(1)


class NextItem(nn.Module):
    """A dict of tensors: a user, an item and the history of items in the same table, and a bag of tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(80, 16), "item": nn.Embedding(90, 16, padding_idx=0)})
        self.position = nn.Embedding(10, 16)
        self.tags = nn.EmbeddingBag(30, 16, mode="mean", padding_idx=0)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        history = self.tables["item"](batch["history"]) + self.position(torch.arange(batch["history"].shape[1]))
        states, _ = self.gru(history)
        found = [self.tables["user"](batch["user"]), self.tables["item"](batch["item"]), self.tags(batch["tags"]), states[:, -1]]
        return {"score": torch.sigmoid(self.mlp(torch.cat(found, dim=1)).squeeze(1))}


def fields(batch: int) -> torch.Tensor:
    """(B, F) random ids, one column per field."""
    return torch.stack([torch.randint(0, rows, (batch,)) for rows in ROWS], dim=1)


def next_item_batch(batch: int) -> dict[str, torch.Tensor]:
    """Random users, items, histories of ten items, and three tags."""
    shapes = {"user": (80, ()), "item": (90, ()), "history": (90, (10,)), "tags": (30, (3,))}
    return {name: torch.randint(0, rows, (batch, *shape)) for name, (rows, shape) in shapes.items()}


def next_item() -> tuple[nn.Module, tuple[Any, ...]]:
    """A model with example inputs, as ``dmt-compile explain examples/plain_models.py:next_item`` takes it."""
    return NextItem(), (next_item_batch(8),)


MODELS: list[tuple[str, type[nn.Module], Callable[[int], tuple[Any, ...]]]] = [
    ("a table per field", WideAndDeep, lambda batch: (fields(batch), torch.randn(batch, 4))),
    ("one table, offsets", FactorisationMachine, lambda batch: (fields(batch),)),
    ("dict, history, bag", NextItem, lambda batch: (next_item_batch(batch),)),
]


def main() -> int:
    torch.manual_seed(0)
    topology = dmt_compile.Topology(HOSTS, RANKS_PER_HOST)
    console = Console(highlight=False)
    table = Table("model", "style", "lookups", "tables", "replicated", "equal", box=None, pad_edge=False)
    failed, replicated, mixed = [], [], []
    for style, kind, make_batch in MODELS:
        program = dmt_compile.towerize(kind(), topology, example_inputs=make_batch(8))
        # Another batch, of another size: nothing of the first one is kept but how many ids a sample has.
        certificate = program.verify(*make_batch(BATCH))
        found = program.lookups
        counts = (len(found.lookups), len(found.tables), len(program.replicated))
        table.add_row(kind.__name__, style, *map(str, counts), "yes" if certificate.passed else "NO")
        kinds = [one.kind for one in program.interactions]
        mixed.append(f"  {kind.__name__}: {', '.join(kinds)}")
        replicated += [f"  {kind.__name__}.{name}: {reason.rpartition('/')[2]}" for name, reason in program.replicated.items()]
        if not certificate.passed:
            failed.append(str(certificate))
    console.print(f"towers on {HOSTS} hosts x {RANKS_PER_HOST} ranks, {BATCH} samples, against the flat model")
    console.print(table)
    console.print("\nwhere the features mix:")
    console.print("\n".join(mixed))
    console.print("\nreplicated on every rank, as dense parameters:")
    console.print("\n".join(replicated))
    for certificate_text in failed:
        console.print(f"\n{certificate_text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
