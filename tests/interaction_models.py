"""Models with every kind of interaction, each kind written in several ways, and what should be found in them.

``ZOO`` names them all. The line that an interaction is reported at is the one that ends in ``# here``, or ``# here 2``, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS = (5, 9, 4, 7, 6)
N = len(ROWS)
DIM = 8
DENSE = 4
FLAT = N * DIM


@dataclass(frozen=True)
class Found:
    """One interaction: kind, how its variant begins, vectors, width, dense vectors."""

    kind: str
    variant: str = ""
    vectors: int = N
    width: int | None = DIM
    dense: int = 0


@dataclass(frozen=True)
class Entry:
    make: Callable[[], nn.Module]
    found: tuple[Found, ...]
    dense: bool = False

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def inputs(self, batch: int = 7) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator().manual_seed(3)
        ids = torch.stack([torch.randint(0, rows, (batch,), generator=draw) for rows in ROWS], dim=1)
        return (ids, torch.randn(batch, DENSE, generator=draw)) if self.dense else (ids,)


ZOO: dict[str, Entry] = {}


def entry(name: str, *found: Found, dense: bool = False) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        ZOO[name] = Entry(make, found, dense)
        return make

    return keep


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 2):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Fields(nn.Module):
    """A table per field."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, dim) for rows in ROWS])

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [table(x[:, i]) for i, table in enumerate(self.tables)]

    def stacked(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.rows(x), dim=1)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.rows(x), dim=1)


class OneTable(nn.Module):
    """One table, the ids of each field shifted."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(ROWS), dim)
        self.starts = nn.Buffer(torch.tensor([0, *ROWS[:-1]]).cumsum(0))

    def stacked(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x + self.starts)


PAIRS = N * (N - 1) // 2
TOGETHER = N + 1


# Pairwise dot


@entry("dot, bmm and tril_indices", Found("pairwise dot", "15 of 36", TOGETHER, DIM, 1), dense=True)
class DotTril(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = mlp(DENSE, 6, DIM), mlp(DIM + 15, 6, 1)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        d = self.bottom(d)
        t = torch.cat([d, *self.rows(x)], dim=1).view(-1, TOGETHER, DIM)
        z = torch.bmm(t, torch.transpose(t, 1, 2))  # here
        li, lj = torch.tril_indices(TOGETHER, TOGETHER, offset=-1)
        return self.top(torch.cat([d, z[:, li, lj]], dim=1))


@entry("dot, einsum and triu_indices", Found("pairwise dot", "15 of 36", TOGETHER, DIM, 1), dense=True)
class DotEinsum(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(DENSE, DIM), mlp(15, 6, 1)
        self.register_buffer("upper", torch.triu_indices(TOGETHER, TOGETHER, offset=1), persistent=False)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        t = torch.cat([self.stacked(x), self.bottom(d).relu().unsqueeze(1)], dim=1)
        z = torch.einsum("bik,bjk->bij", t, t)  # here
        return self.top(z[:, self.upper[0], self.upper[1]])


@entry("dot, matmul and a boolean mask", Found("pairwise dot", "10 of 25"))
class DotMask(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(PAIRS, 6, 1)
        self.mask = nn.Buffer(torch.ones(N, N).triu(1) > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = self.stacked(x)
        z = t @ t.mT  # here
        return self.top(z[:, self.mask])


@entry("dot, everything kept, vectors behind fields", Found("pairwise dot", "all 25"))
class DotAll(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(N * N, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = self.stacked(x).transpose(1, 2)
        return self.top(torch.matmul(t.transpose(1, 2), t).flatten(1))  # here


# Inner products, pair by pair


@entry("inner products in a loop", Found("inner product", "10 pairs"))
class InnerLoop(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(PAIRS, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        dots = []
        for i in range(N):
            for j in range(i + 1, N):
                dots.append((e[i] * e[j]).sum(dim=1, keepdim=True))  # here
        return self.top(torch.cat(dots, dim=1))


@entry("inner products of picked pairs, beside the vectors", Found("inner product", "10 pairs"), Found("concat-MLP", "beside"))
class InnerPicked(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(FLAT + PAIRS, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        row = [i for i in range(N) for _ in range(i + 1, N)]
        col = [j for i in range(N) for j in range(i + 1, N)]
        dots = torch.sum(e[:, row] * e[:, col], dim=2)  # here
        return self.top(torch.cat([e.flatten(1), dots], dim=1))  # here 2


@entry("matrix factorisation", Found("inner product", "1 pair", 2))
class Factorised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS[0], DIM), nn.Embedding(ROWS[1], DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.user(x[:, 0]) * self.item(x[:, 1])).sum(-1)  # here


@entry("element-wise product in an MLP", Found("element-wise product", "1 pair", 2))
class Elementwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS[0], DIM), nn.Embedding(ROWS[1], DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.mul(self.user(x[:, 0]), self.item(x[:, 1])))  # here


@entry("outer products by einsum", Found("outer product"))
class OuterEinsum(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(PAIRS * DIM * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        i, j = torch.triu_indices(N, N, 1)
        return self.top(torch.einsum("bpi,bpj->bpij", e[:, i], e[:, j]).flatten(1))  # here


@entry("outer products by unsqueeze", Found("outer product"))
class OuterLoop(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(PAIRS * DIM * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        made = []
        for i in range(N):
            for j in range(i + 1, N):
                made.append((e[i].unsqueeze(2) * e[j].unsqueeze(1)).flatten(1))  # here
        return self.top(torch.cat(made, dim=1))


# Factorisation machines


@entry("fm by sum-square, first order, one table", Found("factorisation machine", "sum-square"), Found("linear term", "", N, 1))
class Fm(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias = nn.Embedding(sum(ROWS), 1), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        first = self.wide(x + self.starts).sum(dim=1) + self.bias  # here 2
        square = torch.sum(e, dim=1) ** 2  # here
        return first + 0.5 * (square - torch.sum(e**2, dim=1)).sum(1, keepdim=True)


@entry("fm by sum-square of a list", Found("factorisation machine", "sum-square"))
class FmList(Fields):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        total = sum(e)  # here
        squares = sum(one * one for one in e)
        return ((total * total - squares) / 2).sum(dim=-1)


@entry("fm in a loop", Found("factorisation machine", "10 pairs"))
class FmLoop(Fields):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        score = torch.zeros(x.shape[0], device=x.device)
        for i in range(N - 1):
            for j in range(i + 1, N):
                score = score + (e[i] * e[j]).sum(1)  # here
        return torch.sigmoid(score)


@entry("deepfm", Found("factorisation machine", "sum-square"), Found("concat-MLP"), Found("linear term", "", N, 1))
class DeepFm(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Embedding(rows, 1) for rows in ROWS])
        self.deep = mlp(FLAT, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        wide = torch.cat([table(x[:, i]) for i, table in enumerate(self.first)], dim=1).sum(1, keepdim=True)  # here 3
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)  # here
        return wide + fm + self.deep(e.reshape(e.shape[0], -1))  # here 2


@entry("nfm, bi-interaction", Found("factorisation machine", "bi-interaction"))
class Nfm(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.deep = nn.BatchNorm1d(DIM), mlp(DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        cross = e.sum(dim=1).square() - e.square().sum(dim=1)  # here
        return self.deep(self.norm(0.5 * cross))


@entry("afm, attention over pairs", Found("factorisation machine", "attention"))
class Afm(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.h, self.p = nn.Linear(DIM, 4), nn.Linear(4, 1, bias=False), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        pairs = torch.stack([e[i] * e[j] for i in range(N) for j in range(i + 1, N)], dim=1)  # here
        weights = torch.softmax(self.h(torch.relu(self.attention(pairs))), dim=1)
        return self.p((weights * pairs).sum(dim=1))


# Cross networks


class Crossed(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FLAT, 1)


@entry("cross, vector", Found("cross network", "vector, 2 layers"))
class CrossVector(Crossed):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(FLAT, 1, bias=False) for _ in range(2)])
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(FLAT)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = xl = self.flat(x)
        for w, b in zip(self.w, self.b, strict=True):
            xl = x0 * w(xl) + b + xl  # here
        return self.out(xl)


@entry("cross, vector by tensordot", Found("cross network", "vector, 2 layers"))
class CrossTensordot(Crossed):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(2, FLAT, 1))
        self.bias = nn.Parameter(torch.zeros(2, FLAT, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = self.flat(x).unsqueeze(2)
        xl = x0
        for i in range(2):
            dot = torch.tensordot(xl, self.kernels[i], dims=([1], [0]))
            xl = torch.matmul(x0, dot) + self.bias[i] + xl  # here
        return self.out(xl.squeeze(2))


@entry("cross, full, beside an MLP", Found("cross network", "full, 3 layers", TOGETHER, None, 1),
       Found("concat-MLP", "", TOGETHER, None, 1), dense=True)  # fmt: skip
class CrossFull(Fields):
    def __init__(self) -> None:
        super().__init__()
        width = FLAT + DENSE
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.deep, self.out = mlp(width, 6, 5), nn.Linear(width + 5, 1)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        x0 = torch.cat([self.flat(x), d], dim=1)
        xl = x0
        for layer in self.layers:
            xl = x0 * layer(xl) + xl  # here
        return self.out(torch.cat([xl, self.deep(x0)], dim=1))  # here 2


@entry("cross, low-rank, stacked", Found("cross network", "low-rank, 2 layers"))
class CrossLowRank(Crossed):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.ParameterList([nn.Parameter(torch.randn(FLAT, 3)) for _ in range(2)])
        self.v = nn.ParameterList([nn.Parameter(torch.randn(FLAT, 3)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = self.flat(x)
        xl = x0
        for u, v in zip(self.u, self.v, strict=True):
            xl = torch.addcmul(xl, x0, (xl @ v) @ u.t())  # here
        return self.out(torch.relu(xl))


@entry("cross, mixture of experts by einsum", Found("cross network", "mixture of low-rank, 2 layers"))
class CrossMixture(Crossed):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(2, 3, 4, FLAT))
        self.v = nn.Parameter(torch.randn(2, 3, FLAT, 4))
        self.c = nn.Parameter(torch.randn(2, 3, 4, 4))
        self.gate = nn.ModuleList([nn.Linear(FLAT, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = xl = self.flat(x)
        for i in range(2):
            low = torch.tanh(torch.einsum("bw,ewr->ber", xl, self.v[i]))
            low = torch.tanh(torch.einsum("ber,ers->bes", low, self.c[i]))
            high = torch.einsum("ber,erw->bew", low, self.u[i])
            experts = x0.unsqueeze(1) * high  # here
            xl = torch.einsum("bew,be->bw", experts, torch.softmax(self.gate[i](xl), dim=-1)) + xl
        return self.out(xl)


# Compressed interaction


@entry("cin by einsum and conv", Found("compressed interaction", "2 layers"))
class CinConv(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(N * n, 6, 1) for n in (N, 6)])
        self.out = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = h = self.stacked(x)
        kept = []
        for conv in self.convs:
            z = torch.einsum("bhd,bmd->bhmd", h, x0)  # here
            h = torch.relu(conv(z.reshape(z.shape[0], -1, DIM)))
            kept.append(h.sum(dim=2))
        return self.out(torch.cat(kept, dim=1))


@entry("cin by einsum alone", Found("compressed interaction", "2 layers"))
class CinEinsum(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(6, n, N)) for n in (N, 6)])
        self.out = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = h = self.stacked(x)
        kept = []
        for w in self.w:
            z = h.unsqueeze(2) * x0.unsqueeze(1)  # here
            h = torch.einsum("bhmd,ohm->bod", z, w)
            kept.append(h.sum(dim=2))
        return self.out(torch.cat(kept, dim=1))


@entry("xdeepfm", Found("compressed interaction", "1 layer"), Found("concat-MLP"), Found("linear term", "", N, 1))
class XDeepFm(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList([nn.Embedding(rows, 1) for rows in ROWS])
        self.conv, self.out, self.deep = nn.Conv1d(N * N, 6, kernel_size=1), nn.Linear(6, 1), mlp(FLAT, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x).permute(0, 2, 1)
        z = torch.matmul(e.unsqueeze(3), e.unsqueeze(2))  # here
        z = z.view(z.shape[0], DIM, N * N).transpose(1, 2)
        cin = self.out(torch.relu(self.conv(z)).sum(2))
        linear = torch.stack([t(x[:, i]) for i, t in enumerate(self.wide)], 1).sum(1)  # here 3
        return linear + cin + self.deep(e.transpose(1, 2).flatten(1))  # here 2


# Attention over fields


@entry("multi-head attention", Found("self-attention"))
class Heads(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(DIM, 2, batch_first=True), nn.Linear(FLAT, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        a, _ = self.attention(e, e, e)  # here
        return self.out(torch.relu(a + e).flatten(1))


@entry("attention by hand, two layers", Found("self-attention", "2 layers"))
class AutoInt(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.r = (nn.ModuleList([nn.Linear(DIM, DIM, bias=False) for _ in range(2)]) for _ in range(4))
        self.out = nn.Linear(FLAT, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stacked(x)
        for q, k, v, r in zip(self.q, self.k, self.v, self.r, strict=True):
            heads = [m(h).view(-1, N, 2, DIM // 2).transpose(1, 2) for m in (q, k, v)]
            scores = F.softmax(heads[0] @ heads[1].transpose(-1, -2) / 2.0, dim=-1)  # here
            mixed = (scores @ heads[2]).transpose(1, 2).reshape(-1, N, DIM)
            h = torch.relu(mixed + r(h))
        return self.out(h.flatten(1))


@entry("transformer layer with a class token", Found("self-attention", "", TOGETHER, DIM, 1), dense=True)
class Transformer(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.bottom = nn.Linear(DENSE, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        h = self.encoder(torch.cat([token, self.stacked(x), self.bottom(d).unsqueeze(1)], dim=1))  # here
        return self.out(h[:, 0])


# Bilinear


@entry("bilinear, one matrix for all", Found("bilinear", "10 pairs"))
class BilinearAll(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.top = nn.Parameter(torch.randn(DIM, DIM)), mlp(PAIRS * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        made = [torch.matmul(e[i], self.w) * e[j] for i in range(N) for j in range(i + 1, N)]  # here
        return self.top(torch.cat(made, dim=1))


@entry("bilinear, a layer for each field", Found("bilinear", "10 pairs"))
class BilinearEach(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ModuleList([nn.Linear(DIM, DIM, bias=False) for _ in range(N)])
        self.top = mlp(PAIRS * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x).chunk(N, dim=1)
        made = [self.w[i](e[i]) * e[j] for i in range(N) for j in range(i + 1, N)]  # here
        return self.top(torch.cat(made, dim=1).flatten(1))


@entry("bilinear, a matrix for each pair", Found("bilinear", "10 pairs"))
class BilinearPairs(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.top = nn.Parameter(torch.randn(PAIRS, DIM, DIM)), mlp(PAIRS * DIM, 6, 1)
        self.i, self.j = torch.triu_indices(N, N, 1).tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        left = torch.einsum("bpd,pdk->bpk", e[:, self.i], self.w)
        return self.top((left * e[:, self.j]).flatten(1))  # here


@entry("nn.Bilinear of two", Found("bilinear", "", 2))
class BilinearModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS[0], DIM), nn.Embedding(ROWS[1], DIM)
        self.form = nn.Bilinear(DIM, DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self.user(x[:, 0]), self.item(x[:, 1]))  # here


@entry("fibinet", Found("gating"), Found("bilinear", "20 pairs"))
class FiBiNet(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.excite = nn.Sequential(nn.Linear(N, 2), nn.ReLU(), nn.Linear(2, N), nn.ReLU())
        self.w, self.top = nn.Linear(DIM, DIM, bias=False), mlp(2 * PAIRS * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        a = self.excite(e.mean(dim=2))
        v = e * a.unsqueeze(2)  # here
        made = []
        for t in (e, v):
            for i in range(N):
                for j in range(i + 1, N):
                    made.append(self.w(t[:, i]) * t[:, j])  # here 2
        return self.top(torch.cat(made, dim=1))


# Layers and sums


@entry("concat-MLP of mixed widths", Found("concat-MLP", "", TOGETHER, None, 1), dense=True)
class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"t{i}": nn.Embedding(rows, 2 + i) for i, rows in enumerate(ROWS)})
        self.norm = nn.BatchNorm1d(DENSE)
        self.top = mlp(sum(2 + i for i in range(N)) + DENSE, 6, 1)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        e = [self.tables[f"t{i}"](x[:, i]) for i in range(N)]
        return self.top(torch.cat([self.norm(d), *e], dim=-1)).sigmoid()  # here


@entry("concat and one layer", Found("concat-MLP", "one linear layer"))
class OneLayer(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FLAT, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.stacked(x).flatten(1))  # here


@entry("logistic regression", Found("linear term", "", N, 1))
class Logistic(OneTable):
    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.stacked(x).sum(1))  # here


@entry("fields summed", Found("field sum"))
class Summed(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        total = e[0] + e[1] + e[2] + e[3] + e[4]  # here
        return self.top(total)


@entry("fields averaged", Found("field sum", "mean"))
class Averaged(OneTable):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.stacked(x).mean(dim=1))  # here


@entry("two towers", Found("concat-MLP", "a tower", 3), Found("concat-MLP", "a tower", 2))
class TwoTowers(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = mlp(3 * DIM, 6, 4), mlp(2 * DIM, 6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        u = F.normalize(self.user(torch.cat(e[:3], dim=1)), dim=1)  # here
        v = F.normalize(self.item(torch.cat(e[3:], dim=1)), dim=1)  # here 2
        return (u * v).sum(dim=1)


@entry("written into zeros", Found("concat-MLP"))
class Assigned(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(FLAT, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], N, DIM)
        for i, one in enumerate(self.rows(x)):
            out[:, i] = one
        return self.top(out.flatten(1))  # here


class Histories(nn.Module):
    """A target item, its history and a user."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.user = nn.Embedding(ROWS[0], DIM), nn.Embedding(ROWS[1], DIM)
        self.top = mlp(3 * DIM, 6, 1)


@entry("din", Found("attention over a history", "", 7), Found("concat-MLP", "", 3))
class Din(Histories):
    def __init__(self) -> None:
        super().__init__()
        self.score = mlp(4 * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        user, target, history = self.user(x[:, 1]), self.item(x[:, 0]), self.item(x[:, [0, 2, 2, 2, 0, 0]].clamp(max=3))
        q = target.unsqueeze(1).expand_as(history)
        w = self.score(torch.cat([q, history, q - history, q * history], dim=-1))  # here
        pooled = (w * history).sum(dim=1)
        return self.top(torch.cat([user, target, pooled], dim=1))  # here 2


@entry("attention to a masked history of two lookups", Found("attention over a history", "softmax", 14), Found("concat-MLP", "", 5))
class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.kind, self.user = (nn.Embedding(ROWS[i], DIM) for i in (0, 1, 2))
        self.score, self.top = nn.Sequential(nn.Linear(8 * DIM, 6), nn.PReLU(), nn.Linear(6, 1)), mlp(5 * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        items, kinds = x[:, [0, 2, 3, 2, 0, 3]].clamp(max=3), x[:, [1, 1, 0, 1, 0, 1]].clamp(max=8)
        q = torch.cat([self.item(x[:, 0]), self.kind(x[:, 1])], dim=-1).unsqueeze(1)
        k = torch.cat([self.item(items), self.kind(kinds)], dim=-1)
        qs = q.expand(-1, k.size(1), -1)
        w = self.score(torch.cat([qs, k, qs - k, qs * k], dim=-1)).squeeze(-1)  # here
        w = torch.where(items > 0, w, torch.full_like(w, -1e9)).softmax(-1)
        pooled = torch.matmul(w.unsqueeze(1), k).squeeze(1)
        return self.top(torch.cat([self.user(x[:, 2]), q.squeeze(1), pooled], dim=-1))  # here 2


@entry("history attended to by heads", Found("attention over a history", "softmax", 7), Found("concat-MLP", "", 3))
class AskedByHeads(Histories):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        user, target, history = self.user(x[:, 1]), self.item(x[:, 0]), self.item(x[:, [0, 2, 2, 2, 0, 0]].clamp(max=3))
        found, _ = self.attention(target.unsqueeze(1), history, history, need_weights=False)  # here
        return self.top(torch.cat([user, target, found.squeeze(1)], dim=1))  # here 2


@entry("history pooled by itself", Found("concat-MLP", "", 3))
class PooledAlone(Histories):
    """A masked mean and a recurrent layer mix nothing: all rows are of one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, [0, 2, 2, 2, 0, 0]].clamp(max=3)
        history, mask = self.item(ids), (ids > 0).float().unsqueeze(-1)
        mean = (history * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.top(torch.cat([self.user(x[:, 1]), mean, self.gru(history)[1][0]], dim=1))  # here


# More ways


@entry("fields weighed by pair", Found("factorisation machine", "sum of all products"))
class WeighedPairs(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.randn(N, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        return torch.triu(torch.bmm(e, e.transpose(1, 2)) * self.r, diagonal=1).sum((1, 2))  # here


@entry("field-aware", Found("factorisation machine", "10 pairs", 2 * PAIRS))
class FieldAware(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(sum(ROWS), DIM) for _ in ROWS])
        self.starts = nn.Buffer(torch.tensor([0, *ROWS[:-1]]).cumsum(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = [table(x + self.starts) for table in self.tables]
        made = [e[j][:, i] * e[i][:, j] for i in range(N) for j in range(i + 1, N)]  # here
        return torch.stack(made, dim=1).sum(dim=1).sum(dim=1)


@entry("outer product of the sum", Found("outer product", "of the sum"), Found("concat-MLP", "beside"))
class OuterOfSum(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(FLAT + DIM * DIM, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        p = e.sum(dim=1)  # here
        outer = torch.bmm(p.unsqueeze(2), p.unsqueeze(1)).flatten(1)
        return self.top(torch.cat([e.flatten(1), outer], dim=1))  # here 2


@entry("a kernel between the vectors of a pair", Found("bilinear", "10 pairs"))
class Kernel(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.top = nn.Parameter(torch.randn(DIM, PAIRS, DIM)), mlp(PAIRS, 6, 1)
        self.i, self.j = torch.triu_indices(N, N, 1).tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        left = (e[:, self.i].unsqueeze(1) * self.kernel).sum(-1).transpose(1, 2)
        return self.top((left * e[:, self.j]).sum(-1))  # here


@entry("cross, vector by outer products", Found("cross network", "vector, 2 layers"))
class CrossOuter(Crossed):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(FLAT, 1)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = xl = self.flat(x)
        for w in self.w:
            xl = (torch.bmm(x0.unsqueeze(2), xl.unsqueeze(1)) @ w).squeeze(2) + xl  # here
        return self.out(xl)


@entry("a mask from all vectors", Found("gating"))
class MaskedBlock(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mask, self.top = nn.LayerNorm(DIM), mlp(FLAT, 6, FLAT), mlp(FLAT, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        return self.top(self.mask(e.flatten(1)) * self.norm(e).flatten(1))  # here


@entry("dense columns as fields", Found("factorisation machine", "sum-square", N + DENSE, DIM, DENSE),
       Found("concat-MLP", "", N + DENSE, DIM, DENSE), dense=True)  # fmt: skip
class DenseFields(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.deep = nn.Parameter(torch.randn(DENSE, DIM)), mlp(FLAT + DENSE * DIM, 6, 1)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        e = torch.cat([self.stacked(x), d.unsqueeze(2) * self.v], dim=1)
        fm = e.sum(1).square() - e.square().sum(1)  # here
        return fm.sum(1, keepdim=True) + self.deep(e.flatten(1))  # here 2


@entry("values of the fields", Found("concat-MLP"), dense=True)
class Values(Fields):
    """A vector times its feature's value is a vector of that feature."""

    def __init__(self) -> None:
        super().__init__()
        self.top = mlp(FLAT, 6, 1)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x) * torch.cat([d, d[:, :1]], dim=1).unsqueeze(2)
        return self.top(e.flatten(1))  # here


@entry("a layer over the fields", Found("opaque", "a layer across the vectors"))
class Mixer(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.over, self.out = nn.Linear(N, N), nn.Linear(FLAT, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        return self.out((e + F.gelu(self.over(e.transpose(1, 2))).transpose(1, 2)).flatten(1))  # here


@entry("a recurrent layer over the fields", Found("opaque"))
class Recurrent(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(DIM, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.gru(self.stacked(x))  # here
        return self.out(found[:, -1])


@entry("distances", Found("opaque", "cdist"))
class Distances(Fields):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        return torch.cdist(e, e).sum((1, 2))  # here


@entry("nothing mixed")
class Apart(Fields):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.stacked(x)).mean(2)


@entry("cross, each column gated", Found("cross network", "gated full, 2 layers"))
class CrossGated(Crossed):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.g = (nn.ModuleList([nn.Linear(FLAT, FLAT) for _ in range(2)]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x0 = xl = self.flat(x)
        for c, g in zip(self.c, self.g, strict=True):
            xl = x0 * c(xl) * torch.sigmoid(g(xl)) + xl  # here
        return self.out(xl)


class Projected(nn.Module):
    """Tables of different widths, each with a layer to the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, 2 + i) for i, rows in enumerate(ROWS)])
        self.layers = nn.ModuleList([nn.Linear(2 + i, DIM) for i in range(N)])
        self.top = mlp(PAIRS, 6, 1)

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(table(x[:, i])) for i, (table, layer) in enumerate(zip(self.tables, self.layers, strict=True))]


@entry("projected vectors, dot and masked_select", Found("pairwise dot", "10 of 25"))
class ProjectedDot(Projected):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = torch.stack(self.rows(x), dim=1)
        z = torch.matmul(e, e.permute(0, 2, 1))  # here
        upper = torch.triu(torch.ones_like(z), diagonal=1) > 0
        return self.top(torch.masked_select(z, upper).view(-1, PAIRS))


@entry("projected vectors, inner products in a loop", Found("inner product", "10 pairs"))
class ProjectedLoop(Projected):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.rows(x)
        return self.top(torch.stack([(e[i] * e[j]).sum(-1) for i in range(N) for j in range(i + 1, N)], dim=1))  # here


@entry("projected vectors, side by side", Found("concat-MLP"))
class ProjectedFlat(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.deep = mlp(FLAT, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(torch.cat(self.rows(x), dim=1))  # here


@entry("attention in one function", Found("self-attention"))
class OneFunction(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(FLAT, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.stacked(x)
        q, k, v = (layer(e).view(-1, N, 2, DIM // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v)  # here
        return self.out(found.transpose(1, 2).reshape(-1, FLAT))


@entry("fm with a matrix of factors", Found("factorisation machine", "sum-square"))
class Factors(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(FLAT, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.flat(x)
        a = torch.mm(e, self.factors).pow(2)  # here
        return 0.5 * (a - torch.mm(e.pow(2), self.factors.pow(2))).sum(1)
