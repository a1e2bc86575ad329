"""Models whose forward symbolic tracing cannot take, one per style of writing one, each with batches of any size."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FIELDS = (5, 9, 4, 7)
OFFSETS = np.array((0, *np.cumsum(FIELDS)[:-1]), dtype=np.int64)
ITEMS, LENGTH, DIM = 30, 6, 4


def fields(batch: int, g: torch.Generator) -> torch.Tensor:
    """(B, F) ids, one column per field."""
    return torch.stack([torch.randint(0, rows, (batch,), generator=g) for rows in FIELDS], dim=1)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Matrix(nn.Module):
    """Takes one (B, F) matrix of ids."""

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        return (fields(batch, g),)


class DeepFm(Matrix):
    """DeepFM over one table, numpy offsets made to a tensor in forward, and a check of the number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(sum(FIELDS), DIM), nn.Embedding(sum(FIELDS), 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.mlp = mlp(len(FIELDS) * DIM, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x.shape) != 2:
            raise ValueError(f"ids of shape {x.shape}")
        ids = x + x.new_tensor(OFFSETS).unsqueeze(0)
        v = self.table(ids)
        square, sum_square = v.sum(1) ** 2, (v**2).sum(1)
        fm = 0.5 * (square - sum_square).sum(1, keepdim=True)
        y = self.wide(ids).sum(1) + fm + self.mlp(v.reshape(x.size(0), -1)) + self.bias
        return torch.sigmoid(y.squeeze(1))


class Cross(Matrix):
    """DCN with a zero state built from the batch size, and a loop over the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in FIELDS)
        width = len(FIELDS) * DIM
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, 1)) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.top = mlp(width + 2, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self.tables[i](x[:, i]) for i in range(x.shape[1])]
        x0 = self.norm(torch.cat(rows, dim=-1))
        state = torch.zeros(x.size(0), 2, device=x.device)
        crossed = x0
        for weight in self.weights:
            crossed = x0 * torch.mm(crossed, weight) + crossed
        return self.top(torch.cat([crossed, state + len(rows)], 1))


class Compressed(Matrix):
    """xDeepFM's CIN by einsum, over split layers whose number follows from the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(FIELDS), DIM)
        self.convs = nn.ModuleList(nn.Conv1d(len(FIELDS) * n, 6, 1) for n in (len(FIELDS), 3))
        self.out = nn.Linear(6 + 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, count = x.shape
        assert count == len(FIELDS), f"{count} fields"
        x0 = h = self.table(x + torch.from_numpy(OFFSETS))
        kept = []
        for i, conv in enumerate(self.convs):
            z = torch.einsum("bhd,bmd->bhmd", h, x0).reshape(batch, -1, DIM)
            h = F.relu(conv(z))
            if i < len(self.convs) - 1:
                h, direct = torch.split(h, 3, dim=1)
            else:
                direct = h
            kept.append(direct.sum(-1))
        return self.out(torch.cat(kept, 1))


class ByKeys(nn.Module):
    """Iterates over the keys of a dict of features, dense ones by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"c{i}": nn.Embedding(rows, DIM) for i, rows in enumerate(FIELDS)})
        self.dense = nn.ModuleDict({"age": nn.Linear(1, DIM)})
        self.out = mlp(DIM * (len(FIELDS) + 1), 6, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = []
        for name, value in batch.items():
            if name in self.tables:
                found.append(self.tables[name](value))
            elif value.dim() == 1:
                found.append(self.dense[name](value.unsqueeze(1)))
        logit = self.out(torch.cat(found, -1))
        return {"logit": logit, "p": torch.sigmoid(logit)}

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        columns = fields(batch, g).unbind(1)
        return ({**{f"c{i}": column for i, column in enumerate(columns)}, "age": torch.rand(batch, generator=g)},)


class Prediction(NamedTuple):
    score: torch.Tensor
    parts: list[torch.Tensor]


class Named(Matrix):
    """Returns a NamedTuple; layers are made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM, padding_idx=0) for rows in FIELDS)
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> Prediction:
        parts = [table(column) for table, column in zip(self.tables, x.T, strict=True)]
        normed = nn.Softmax(dim=1)(torch.stack(parts, 1))
        return Prediction(nn.Sigmoid()(self.out(normed.mean(1))), parts)


@dataclass
class Batch:
    ids: torch.Tensor
    dense: torch.Tensor
    scale: float


@dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None


class Dataclasses(nn.Module):
    """Takes and returns dataclasses, and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(FIELDS), DIM)
        self.register_buffer("offsets", torch.from_numpy(OFFSETS))
        self.out = nn.Linear(len(FIELDS) * DIM + 3, 1)

    def forward(self, batch: Batch, labels: torch.Tensor | None = None) -> Result:
        ids = batch.ids + self.offsets[: int(batch.ids.shape[-1])]
        rows = torch.cat([*self.table(ids).unbind(1), batch.dense * batch.scale], dim=1)
        logits = self.out(rows).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, labels) if labels is not None else None
        return Result(logits, loss)

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        return (Batch(fields(batch, g), torch.rand(batch, 3, generator=g), 0.5),)


class Sequence(nn.Module):
    """Takes a user's id, a history of items and a candidate."""

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        history = torch.randint(1, ITEMS, (batch, LENGTH), generator=g)
        history[:, LENGTH // 2 :] *= (torch.rand(batch, LENGTH - LENGTH // 2, generator=g) > 0.5).long()
        user = torch.randint(0, 11, (batch,), generator=g)
        return user, history, torch.randint(1, ITEMS, (batch,), generator=g)


class Interest(Sequence):
    """DIN: a mask of the history's length, attention of the candidate over it."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(11, DIM), nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.attention = nn.Sequential(nn.Linear(4 * DIM, 5), nn.PReLU(), nn.Linear(5, 1))
        self.out = mlp(3 * DIM, 6, 1)

    def forward(self, user: torch.Tensor, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        lengths = (history != 0).sum(1)
        mask = torch.arange(history.shape[1], device=history.device)[None, :] < lengths[:, None]
        keys, query = self.item(history), self.item(item)
        repeated = query.unsqueeze(1).expand(-1, history.shape[1], -1)
        score = self.attention(torch.cat([repeated, keys, repeated - keys, repeated * keys], -1)).squeeze(-1)
        score = torch.where(mask, score, torch.full_like(score, -1e9))
        interest = torch.bmm(F.softmax(score, 1).unsqueeze(1), keys).squeeze(1)
        return self.out(torch.cat([self.user(user), interest, query], dim=-1))


class Recurrent(Sequence):
    """A GRU over the history, its first state built from the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(11, DIM), nn.Embedding(ITEMS, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, user: torch.Tensor, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        first = torch.zeros(1, history.size(0), DIM)
        rows = self.item(history)
        if rows.shape[1] > 1:
            _, last = self.gru(rows, first)
        else:
            last = rows.transpose(0, 1)
        return (last[0] * self.item(item)).sum(-1) + self.user(user).sum(-1)


class Attentive(Sequence):
    """Self-attention with positions by arange and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.place = nn.Embedding(ITEMS, DIM), nn.Embedding(LENGTH, DIM)
        self.user = nn.Embedding(11, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, user: torch.Tensor, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        steps = history.shape[1]
        rows = self.item(history) + self.place(torch.arange(steps, device=history.device))
        hidden = torch.triu(torch.ones(steps, steps, dtype=torch.bool), diagonal=1)
        mixed, _ = self.attention(rows, rows, rows, attn_mask=hidden, need_weights=False)
        final = self.norm(mixed + rows)[:, -1]
        return (final * self.item(item)).sum(-1) + (self.user(user) * final).sum(-1)


class Functional(nn.Module):
    """Functional lookups, in two dimensions and with weights per sample, of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(9, DIM)), nn.Parameter(torch.randn(7, DIM))
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        one, several, weight = columns
        assert several.ndim == 2
        rows = F.embedding(one, self.a, padding_idx=-1)
        bags = F.embedding_bag(several, self.b, mode="sum", per_sample_weights=weight)
        return self.out(torch.cat((rows, bags), 1))

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        several = torch.randint(0, 7, (batch, 3), generator=g)
        return torch.randint(0, 9, (batch,), generator=g), several, torch.rand(batch, 3, generator=g)


class Nested(nn.Module):
    """Nested tuples and an OrderedDict, taken apart by loops over their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in FIELDS)
        self.bags = nn.ModuleDict({"tags": nn.EmbeddingBag(8, DIM, mode="mean"), "words": nn.EmbeddingBag(6, DIM, mode="max")})
        self.out = mlp(DIM * (len(FIELDS) + 2) + 2, 5, 1)

    def forward(self, ids: tuple[Any, Any], bags: Mapping[str, torch.Tensor], dense: torch.Tensor) -> torch.Tensor:
        first, rest = ids
        rows = [table(column) for table, column in zip(self.tables, [first, *rest], strict=True)]
        rows += [self.bags[name](value) for name, value in bags.items()]
        return self.out(torch.cat([*rows, dense], -1))

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        first, *rest = fields(batch, g).unbind(1)
        bags = OrderedDict(tags=torch.randint(0, 8, (batch, 3), generator=g), words=torch.randint(0, 6, (batch, 2), generator=g))
        return (first, list(rest)), bags, torch.rand(batch, 2, generator=g)


class Offsets(nn.Module):
    """Bags in offsets form, beside a column that is cast from floats."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, DIM, mode="sum", include_last_offset=True)
        self.one = nn.Embedding(5, DIM)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, values: torch.Tensor, offsets: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if len(matrix.size()) == 1:
            matrix = matrix.unsqueeze(-1)
        return self.out(torch.cat([self.bag(values, offsets), self.one(matrix[:, 0].long()) * matrix[:, 1:2]], 1))

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        lengths = torch.randint(0, 4, (batch,), generator=g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        matrix = torch.stack([torch.randint(0, 5, (batch,), generator=g).float(), torch.rand(batch, generator=g)], 1)
        return torch.randint(0, 12, (int(lengths.sum()),), generator=g), offsets, matrix


class Stacked(nn.Module):
    """Bags of several features whose offsets stand in one tensor, (F, B), and a loop over a computed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for rows in FIELDS[:3])
        self.out = nn.Linear(3, 1)

    def forward(self, dense: torch.Tensor, offsets: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        rows = [bag(ids, offsets[k]) for k, (bag, ids) in enumerate(zip(self.bags, values, strict=True))]
        batch, width = dense.shape
        table = torch.cat(rows, 1).view(batch, -1, width)
        products = table @ table.transpose(1, 2)
        left = torch.tensor([a for a in range(products.shape[1]) for _ in range(a)])
        right = torch.tensor([b for a in range(products.shape[1]) for b in range(a)])
        return self.out(products[:, left, right]) + dense.sum(1, keepdim=True)

    def inputs(self, batch: int, g: torch.Generator) -> tuple[Any, ...]:
        lengths = torch.randint(0, 4, (3, batch), generator=g)
        offsets = torch.cat([torch.zeros(3, 1, dtype=torch.long), lengths.cumsum(1)[:, :-1]], 1)
        values = [torch.randint(0, rows, (int(n.sum()),), generator=g) for rows, n in zip(FIELDS, lengths, strict=False)]
        return torch.rand(batch, DIM, generator=g), offsets, values


class Counting(Matrix):
    """Counts its calls in a buffer, freezes a part with no_grad, and shares a table with a second layer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in FIELDS)
        self.frozen = nn.Embedding(FIELDS[0], DIM)
        self.gate = nn.Linear(DIM, DIM)
        self.register_buffer("calls", torch.zeros(()))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        rows = torch.stack([self.tables[i](x[:, i]) for i in range(len(x[0]))], 1)
        with torch.no_grad():
            fixed = self.gate(self.frozen(x[:, 0])) * self.calls
        return self.out(rows.sum(1) + fixed) + self.gate(rows[:, 0]).sum(-1, keepdim=True)


class Modes(Matrix):
    """Reads self.training: functional dropout and batch norm, and a loss in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in FIELDS)
        self.norm = nn.BatchNorm1d(DIM * len(FIELDS))
        self.out = nn.Linear(DIM * len(FIELDS), 1)
        self.aux = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> Any:
        rows = torch.cat([table(x[:, i]) for i, table in enumerate(self.tables) if i < x.shape[1]], 1)
        y = self.out(F.dropout(self.norm(rows), 0.4, self.training)).reshape(len(x))
        if self.training:
            return self.aux(rows[:, :DIM]).square().mean(1) + y, y
        return torch.sigmoid(y)


class Rearranged(Matrix):
    """Pairs of fields by index lists that are built in forward, over a table shared by all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(FIELDS), DIM)
        self.kernel = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x + torch.tensor(OFFSETS, device=x.device))
        count = rows.shape[1]
        i, j = [], []
        for a in range(count - 1):
            for b in range(a + 1, count):
                i.append(a)
                j.append(b)
        left, right = rows[:, i], rows[:, j]
        return ((left @ self.kernel) * right).sum(-1).mean(1, keepdim=True).view(x.size(0))


class FieldAware(Matrix):
    """Every table is read with every field."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(sum(FIELDS), DIM) for _ in FIELDS)
        self.linear = nn.Embedding(sum(FIELDS), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x.new_tensor(OFFSETS)
        rows = [table(x) for table in self.tables]
        pairs = [rows[b][:, a] * rows[a][:, b] for a, b in itertools.combinations(range(x.size(1)), 2)]
        return torch.stack(pairs, 1).sum((1, 2)) + self.linear(x).sum((1, 2))


MODELS: tuple[type[Any], ...] = (
    *(DeepFm, Cross, Compressed, ByKeys, Named, Dataclasses, Interest, Recurrent, Attentive, Functional),
    *(Nested, Offsets, Stacked, Counting, Modes, Rearranged, FieldAware),
)


def given(model: Any, batch: int, seed: int = 0) -> tuple[Any, ...]:
    """What forward takes for ``batch`` samples."""
    inputs: tuple[Any, ...] = model.inputs(batch, torch.Generator().manual_seed(seed))
    return inputs
