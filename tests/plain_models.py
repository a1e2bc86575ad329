"""Plain PyTorch models that the tests compile, one per way to write a lookup, each with batches of any size.

``CASES`` names them all. A case is built anew at every call, with the same values; ``inputs(batch, seed, ids)`` gives what its
forward takes, for ``batch`` samples whose ids are of type ``ids``.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FIELDS = (5, 9, 4, 7)
BIG = 11

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Random inputs of one batch."""

    def __init__(self, batch: int, seed: int = 0, ids: torch.dtype = torch.int64) -> None:
        self.batch = batch
        self.type = ids
        self.generator = torch.Generator().manual_seed(seed)

    def id(self, rows: int, *shape: int) -> torch.Tensor:
        """(B, *shape) ids below ``rows``."""
        return torch.randint(0, rows, (self.batch, *shape), generator=self.generator).to(self.type)

    def fields(self) -> torch.Tensor:
        """(B, F) ids, one column per field."""
        return torch.stack([self.id(rows) for rows in FIELDS], dim=1)

    def dense(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator)

    def bags(self, rows: int, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and offsets of bags of 0 to 3 ids."""
        lengths = torch.randint(0, 4, (self.batch,), generator=self.generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(self.type)
        count = int(lengths.sum())
        return torch.randint(0, rows, (count,), generator=self.generator).to(self.type), offsets if last else offsets[:-1]

    def weights(self, count: int) -> torch.Tensor:
        return torch.rand(count, generator=self.generator) + 0.5


# One table per field


class PerField(nn.Module):
    """A ModuleList of tables beside a wide part of dim 1, one matrix of ids sliced by column."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList([nn.Embedding(rows, 3) for rows in FIELDS])
        self.wide = nn.ModuleList([nn.Embedding(rows, 1) for rows in FIELDS])
        self.top = nn.Linear(3 * len(FIELDS) + 2, 1)

    def forward(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        deep = [table(x[:, i]) for i, table in enumerate(self.deep)]
        wide = sum(table(x[:, i]) for i, table in enumerate(self.wide))
        return (self.top(torch.cat([*deep, dense], dim=1)) + wide).squeeze(1)


class FloatMatrix(nn.Module):
    """Ids and dense features in one float matrix; tables in a ModuleDict and in attributes, of dims 1, 2, 3."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"a": nn.Embedding(FIELDS[0], 1), "b": nn.Embedding(FIELDS[1], 2)})
        self.c = nn.Embedding(FIELDS[2], 3)
        self.top = nn.Linear(1 + 2 + 3 + 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :3].long()
        columns = [self.tables["a"](ids[:, 0]), self.tables["b"](ids[:, 1]), self.c(x[:, 2].int())]
        return self.top(torch.cat([*columns, x[:, 3:]], dim=-1))


class FieldAware(nn.Module):
    """As many tables as fields, each read with the ids of all fields."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(sum(FIELDS), 2) for _ in FIELDS])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = [table(x) for table in self.tables]
        pairs = [read[j][:, i] * read[i][:, j] for i in range(len(FIELDS)) for j in range(i + 1, len(FIELDS))]
        return torch.stack(pairs, dim=1).sum(dim=(1, 2))


class FieldMajor(nn.Module):
    """Ids with the fields in front of the samples, and ids laid out in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.flat = nn.Embedding(BIG, 2), nn.Embedding(BIG, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        front = self.table(x.t())
        return front.permute(1, 0, 2).flatten(1).sum(1) + self.flat(x.reshape(-1)).view(-1, 3 * len(FIELDS)).sum(1)


# One table for all fields


class OneTable(nn.Module):
    """All fields share a table, each field's ids shifted by an offset; a factorisation machine."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bias = nn.Embedding(sum(FIELDS), 4), nn.Embedding(sum(FIELDS), 1)
        starts = torch.tensor(FIELDS).cumsum(0) - torch.tensor(FIELDS)
        self.register_buffer("starts", starts, persistent=False)
        self.top = nn.Linear(4 * len(FIELDS), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.long() + self.starts.unsqueeze(0)
        rows = self.embedding(ids)
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
        return pairs + self.bias(ids).sum(1) + self.top(rows.flatten(1))


# Bags


class Bags(nn.Module):
    """Fixed bags of every pooling with and without padding, with weights; as modules and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.EmbeddingBag(BIG, 3, mode="sum", padding_idx=0)
        self.mean = nn.EmbeddingBag(BIG, 2, padding_idx=-1)
        self.max = nn.EmbeddingBag(BIG, 1, mode="max")
        self.weighted = nn.EmbeddingBag(BIG, 3, mode="sum")
        self.table = nn.Parameter(torch.randn(BIG, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = [self.sum(x), self.mean(input=y), self.max(x), self.weighted(y, per_sample_weights=weights)]
        found.append(F.embedding_bag(x, self.table, mode="sum", padding_idx=2))
        found.append(F.embedding_bag(y, self.table, None, None, 2.0, False, "max"))
        return torch.cat(found, dim=1)


class Offsets(nn.Module):
    """Bags in offsets form, with and without the last offset, weighted, two lookups of the same bags, as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.EmbeddingBag(BIG, 3, mode="sum")
        self.mean = nn.EmbeddingBag(BIG, 2, include_last_offset=True)
        self.other = nn.EmbeddingBag(BIG, 1, mode="max", include_last_offset=True, padding_idx=1)
        self.table = nn.Parameter(torch.randn(BIG, 2))
        self.single = nn.Embedding(BIG, 2, sparse=True)

    def forward(self, a: Any, starts: Any, weights: Any, b: Any, bounds: Any, c: Any, begin: Any, one: Any) -> torch.Tensor:
        found = [self.sum(a, starts, weights), self.mean(b, bounds), self.other(b, bounds)]
        found.append(F.embedding_bag(c, self.table, begin, mode="mean", padding_idx=3))
        return torch.cat([*found, self.single(one)], dim=1)


class ListsOfOffsets(nn.Module):
    """The inputs of the original DLRM: a list of ids per feature, and the offsets of all features stacked in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(BIG, 2, mode="sum", sparse=True) for _ in range(3)])
        self.top = nn.Linear(6 + 2, 1)

    def forward(self, dense: torch.Tensor, offsets: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
        found = [table(ids[k], offsets[k]) for k, table in enumerate(self.tables)]
        return self.top(torch.cat([*found, dense], dim=1))


# Sequences


class History(nn.Module):
    """One table for an item and its history; the history pooled by mean, masked mean, max and a GRU, and attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(BIG, 4, padding_idx=0)
        self.user = nn.Embedding(BIG, 4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.top = nn.Linear(4 * 7, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        item, user = self.item(batch["item"]), self.user(batch["user"])
        rows = self.item(batch["history"])
        mask = (batch["history"] != 0).unsqueeze(-1).to(rows.dtype)
        masked = (rows * mask).sum(1) / mask.sum(1).clamp(min=1)
        last, _ = self.gru(rows)
        attended, _ = self.attention(item.unsqueeze(1), rows, rows, need_weights=False)
        found = [item, user, rows.mean(1), masked, rows.max(1).values, last[:, -1], attended[:, 0]]
        return {"score": torch.sigmoid(self.top(torch.cat(found, dim=1))), "rows": rows}


class SequenceOnly(nn.Module):
    """Nothing but one sequence, looked up by the same module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(BIG, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).mean(1) + self.table(x).flatten(1).sum(1, keepdim=True)


# Ways to call and to nest


class Functional(nn.Module):
    """Functional forms with positional and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(BIG, dim)) for dim in (1, 2, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = [F.embedding(x, self.a), F.embedding(input=y, weight=self.b, padding_idx=-2)]
        found += [F.embedding(x, self.c, 3, None, 2.0, False, True), torch.embedding(self.b, x)]
        return torch.cat(found, dim=1)


Pair = namedtuple("Pair", ["first", "rest"])


class Nested(nn.Module):
    """Inputs in a named tuple, lists and dicts, by position and by keyword, beside values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(BIG, 2) for _ in range(4)])

    def forward(self, pair: Pair, scale: float, *, more: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        ids = [pair.first, pair.rest[0], pair.rest[1][0], more["x"][0]]
        return [scale * table(one) for table, one in zip(self.tables, ids, strict=True)]


class Mixed(nn.Module):
    """Half, bfloat16 and frozen tables, and lookups without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.f16 = nn.Embedding(BIG, 2, dtype=torch.half)
        self.bf16 = nn.Embedding(BIG, 3, dtype=torch.bfloat16)
        self.frozen = nn.Embedding.from_pretrained(torch.randn(BIG, 2))
        self.still = nn.Embedding(BIG, 2)
        self.some = nn.Embedding(BIG, 2)
        self.scale = nn.Parameter(torch.randn(2))
        self.top = nn.Linear(11, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            still, some = self.still(x) * self.scale, self.some(x)
        found = [self.f16(x).float(), self.bf16(y).float(), self.frozen(y), still * self.scale, some + self.some(y)]
        return self.top(torch.cat(found, dim=1))


class Refusing(nn.Module):
    """A table of every kind that no owner can serve, and one that it can."""

    def __init__(self) -> None:
        super().__init__()
        self.served = nn.Embedding(BIG, 4)
        self.scaled = nn.Embedding(BIG, 4, scale_grad_by_freq=True)
        self.position = nn.Embedding(3, 4)
        self.second = nn.Embedding(BIG, 4)
        self.tied = nn.Embedding(BIG, 4)

    def forward(self, x: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        rows = self.served(history) + self.position(torch.arange(history.shape[1]))
        chosen = self.second((rows.sum(dim=(1, 2)).abs() * 7).long() % BIG)
        return (rows.mean(1) + chosen + self.scaled(x) + self.tied(x)) @ self.tied.weight.t()


class Shared(nn.Module):
    """Two modules around one parameter, in a submodule that runs twice."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(BIG, 3), nn.Embedding(BIG, 3)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.one(x) * self.two(y)

    def __init__(self) -> None:
        super().__init__()
        self.tower = self.Tower()
        self.again = self.tower
        self.alone = nn.Embedding(BIG, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.tower(x, y) + self.again(y, x) * self.alone(x)


class Renormed(nn.Module):
    """Tables whose rows are scaled down when they are read: the forward pass changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bag = nn.Embedding(BIG, 3, max_norm=0.7), nn.EmbeddingBag(BIG, 2, max_norm=0.5, norm_type=1.0)
        self.top = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.one(x[:, 0]), self.bag(x), self.one(y)], dim=1))


# Rounds of exchanges and other units than samples


class Chained(nn.Module):
    """Ids and weights that are computed from other lookups, three deep; the last lookup's table is read in two rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(BIG, 3), nn.Embedding(BIG, 2)
        self.weights = nn.Embedding(BIG, 1)
        self.bag = nn.EmbeddingBag(BIG, 4, mode="sum")
        self.register_buffer("codes", torch.randn(3, BIG))
        self.top = nn.Linear(2 + 4 + 2 + 3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)
        chosen = (rows.mean(1) @ self.codes).argmax(-1)
        found = self.last(chosen)
        bag = self.bag(y, per_sample_weights=self.weights(y).squeeze(-1))
        again = self.first(((found.sum(1) + bag.sum(1)).abs() * 5).long() % BIG)
        return self.top(torch.cat([found, bag, self.last(y[:, 0]), again], dim=1))


class Ragged(nn.Module):
    """As many ids as the data has: padding is dropped before the lookups, and rows are added up per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.user = nn.Embedding(BIG, 4, padding_idx=0), nn.Embedding(BIG, 4)
        self.price = nn.Embedding(BIG, 1)

    def forward(self, history: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        mask = history > 0
        kept = history[mask]
        sample = mask.nonzero()[:, 0]
        rows = self.item(kept) * self.price(kept)
        pooled = torch.zeros(history.shape[0], 4).index_add(0, sample, rows)
        return pooled * self.user(user) + self.item(user)


class BagsOfParts(nn.Module):
    """Several bags per sample, of ids in rows and of ids with offsets that the model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.EmbeddingBag(BIG, 3, mode="mean")
        self.cut = nn.EmbeddingBag(BIG, 2, mode="sum")
        self.top = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.pairs(x.reshape(-1, 2)).view(-1, 2 * 3)
        starts = torch.arange(0, x.numel(), 2, device=x.device)
        return self.top(torch.cat([pairs, self.cut(x.reshape(-1), starts).view(-1, 2 * 2)], dim=1))


class Indexed(nn.Module):
    """Rows taken by indexing, also from the end, and by index_select; a bias read by a mask and by a slice stays dense."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.more = nn.Parameter(torch.randn(BIG, 3)), nn.Parameter(torch.randn(BIG, 2))
        self.bias = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        taken = [self.rows[x - BIG].flatten(1), self.more.index_select(0, y), torch.index_select(self.more, 0, y)]
        return torch.cat(taken, dim=1).sum(1, keepdim=True) + self.bias[:1] + self.bias[torch.tensor([1, 2])].sum()


class PooledLate(nn.Module):
    """Rows that are pooled behind layers that need another lookup, weights without gradients, and ids of two samples in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.user, self.pair = nn.Embedding(BIG, 4), nn.Embedding(BIG, 4), nn.Embedding(BIG, 2)
        self.still = nn.EmbeddingBag(BIG, 2, mode="sum")
        self.short = nn.EmbeddingBag(BIG, 2, mode="sum", dtype=torch.bfloat16)
        self.gate, self.top = nn.Linear(4, 4), nn.Linear(12, 1)

    def forward(self, history: torch.Tensor, user: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = self.item(history)
        gate = torch.sigmoid(self.gate(self.user(user)))
        weights = (weights * gate[:, :1]).softmax(1)
        with torch.no_grad():
            still = self.still(history, per_sample_weights=weights)
        pooled = (rows * (history > 2).unsqueeze(2)).sum(1) * gate
        spread = self.pair(torch.cat([user, user]).view(2, -1)).sum(0)
        short = self.short(history, per_sample_weights=weights.detach().bfloat16()).float()
        return self.top(torch.cat([pooled, gate, still, short], dim=1)) + spread.sum(1, keepdim=True) + weights[:, :1]


class Hashed(nn.Module):
    """Two small tables in place of a large one: bags of quotients and of remainders, with the offsets of the ids that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.quotients, self.remainders = nn.EmbeddingBag(BIG, 3, mode="sum"), nn.EmbeddingBag(4, 3, mode="sum")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        quotients = self.quotients(torch.div(ids, 4, rounding_mode="floor"), offsets)
        return quotients * self.remainders(torch.remainder(ids, 4).long(), offsets.long())


class PooledByTheModel(nn.Module):
    """Rows that the model pools at once: sum, mean and max, plain or weighted by a mask or a number for each id."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(BIG, 2, padding_idx=0, sparse=i == 1) for i in range(8)])
        self.short = nn.Embedding(BIG, 2, dtype=torch.bfloat16)
        self.top = nn.Linear(2 * 8, 1)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        t, mask = self.tables, (x > 0).unsqueeze(-1)
        found = [t[0](x).sum(1), torch.mean(t[1](x), dim=1), t[2](x).max(dim=1)[0], torch.amax(t[3](x), 1)]
        found += [(t[4](x) * mask.float()).sum(dim=1) / mask.sum(1).clamp(min=1), (mask * t[5](x)).mean(-2)]
        found += [torch.max(t[6](x) * weights.unsqueeze(2), 1).values, t[7](x).sum(1, keepdim=True).squeeze(1)]
        half = (self.short(x) * mask).sum(1).float().sum(1, keepdim=True)
        return self.top(torch.cat(found, dim=1)) + half


class FieldByField(nn.Module):
    """One table for all fields, read field by field with the field's start added in Python, and a list of ids of one field."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = [0, *torch.tensor(FIELDS).cumsum(0).tolist()]
        self.table = nn.Parameter(torch.randn(sum(FIELDS), 3))
        self.top = nn.Linear(3 * len(FIELDS), 1)

    def forward(self, x: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        found = [F.embedding(x[:, i] + self.starts[i], self.table) for i in range(len(FIELDS))]
        liked = F.embedding_bag(history + self.starts[1], self.table, mode="mean", padding_idx=self.starts[1])
        return self.top(torch.cat(found, dim=1)) + liked


class FieldsOverTime(nn.Module):
    """One table for all fields and ids of several fields at several times, (B, n, F), and the same ids in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(sum(FIELDS), 2), nn.Embedding(sum(FIELDS), 1, sparse=True)
        self.register_buffer("starts", torch.tensor(FIELDS).cumsum(0) - torch.tensor(FIELDS), persistent=False)
        self.gru = nn.GRU(2 * len(FIELDS), 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x + self.starts
        return self.gru(self.table(ids).flatten(2))[0][:, -1] + self.wide(ids).sum((1, 2))


@dataclass(frozen=True)
class Case:
    """A model and its inputs."""

    model: Callable[[], nn.Module]
    inputs: Callable[[Draw], Any]

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model()

    def batch(self, size: int, seed: int = 0, ids: torch.dtype = torch.int64) -> Inputs:
        """(args, kwargs) of one batch."""
        made = self.inputs(Draw(size, seed, ids))
        return made if len(made) == 2 and isinstance(made[0], tuple) else (made, {})

    def example(self, size: int = 7) -> Any:
        """One batch as ``towerize`` takes it: positional, or all by keyword where forward has arguments by keyword only."""
        args, kwargs = self.batch(size, seed=99)
        names = list(inspect.signature(self.model.forward).parameters)[1:]  # type: ignore[attr-defined]
        return {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else args


def _offsets(draw: Draw) -> tuple[Any, ...]:
    a, starts = draw.bags(BIG, last=False)
    return (a, starts, draw.weights(len(a)), *draw.bags(BIG, last=True), *draw.bags(BIG, last=False), draw.id(BIG))


def _lists(draw: Draw) -> tuple[Any, ...]:
    bags = [draw.bags(BIG, last=False) for _ in range(3)]
    return draw.dense(2), torch.stack([offsets for _, offsets in bags]), [ids for ids, _ in bags]


def _history(draw: Draw) -> tuple[Any, ...]:
    return ({"item": draw.id(BIG), "user": draw.id(BIG), "history": draw.id(BIG, 5)},)


def _nested(draw: Draw) -> Inputs:
    return (Pair(draw.id(BIG), [draw.id(BIG), (draw.id(BIG),)]), 0.5), {"more": {"x": [draw.id(BIG)]}}


CASES = {
    "per field": Case(PerField, lambda draw: (draw.fields(), draw.dense(2))),
    "float matrix": Case(FloatMatrix, lambda draw: (torch.cat([draw.fields()[:, :3].float(), draw.dense(2)], dim=1),)),
    "field aware": Case(FieldAware, lambda draw: (draw.fields(),)),
    "field major": Case(FieldMajor, lambda draw: (draw.fields(),)),
    "one table": Case(OneTable, lambda draw: (draw.fields(),)),
    "bags": Case(Bags, lambda draw: (draw.id(BIG, 3), draw.id(BIG, 2), draw.dense(2).abs())),
    "offsets": Case(Offsets, _offsets),
    "stacked offsets": Case(ListsOfOffsets, _lists),
    "history": Case(History, _history),
    "sequence only": Case(SequenceOnly, lambda draw: (draw.id(BIG, 4),)),
    "functional": Case(Functional, lambda draw: (draw.id(BIG), draw.id(BIG))),
    "nested": Case(Nested, _nested),
    "mixed": Case(Mixed, lambda draw: (draw.id(BIG), draw.id(BIG))),
    "refusing": Case(Refusing, lambda draw: (draw.id(BIG), draw.id(BIG, 3))),
    "renormed": Case(Renormed, lambda draw: (draw.id(BIG, 3), draw.id(BIG))),
    "chained": Case(Chained, lambda draw: (draw.id(BIG, 2), draw.id(BIG, 3))),
    "ragged": Case(Ragged, lambda draw: (draw.id(BIG, 4), draw.id(BIG))),
    "bags of parts": Case(BagsOfParts, lambda draw: (draw.id(BIG, 4),)),
    "pooled late": Case(PooledLate, lambda draw: (draw.id(BIG, 3), draw.id(BIG), draw.dense(3))),
    "hashed": Case(Hashed, lambda draw: draw.bags(4 * BIG, last=False)),
    "pooled by the model": Case(PooledByTheModel, lambda draw: (draw.id(BIG, 3), draw.dense(3).abs())),
    "indexed": Case(Indexed, lambda draw: (draw.id(BIG, 2), draw.id(BIG))),
    "field by field": Case(FieldByField, lambda draw: (draw.fields(), draw.id(FIELDS[1], 3))),
    "fields over time": Case(FieldsOverTime, lambda draw: (torch.stack([draw.id(rows, 3) for rows in FIELDS], dim=2),)),
    "shared": Case(Shared, lambda draw: (draw.id(BIG), draw.id(BIG))),
}
