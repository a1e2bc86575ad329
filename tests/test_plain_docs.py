"""docs/lookups.md says what becomes of every way to write a lookup: its tables are made, and every row verified, by these tests.

``UPDATE_GOLDENS=1 pytest tests/test_plain_docs.py`` rewrites the file; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmt_compile import Topology, towerize

FILE = Path(__file__).resolve().parents[1] / "docs" / "lookups.md"
ROWS, DIM, BATCH, COUNT = 12, 4, 9, 3
START = torch.tensor([0, 3, 6])


class Reader(nn.Module):
    """``read`` over a table called ``table``, beside a lookup that is always served."""

    def __init__(self, table: Any, read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.anchor = nn.Embedding(ROWS, 1)
        self.table = table
        self.read = read

    def forward(self, anchor: torch.Tensor, x: Any, y: Any = None, z: Any = None) -> Any:
        return {"anchor": self.anchor(anchor), "found": self.read(self.table, x, y, z)}


@dataclass(frozen=True)
class Style:
    """A way to write a lookup: how it reads in a user's model, what makes the table, and what is given to it."""

    code: str
    table: Callable[[], Any]
    read: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (BATCH, *shape), generator=torch.Generator().manual_seed(0))


def one() -> tuple[Any, ...]:
    return (ids(),)


def some() -> tuple[Any, ...]:
    return (ids(COUNT),)


def bags(last: bool = False) -> tuple[Any, ...]:
    offsets = torch.tensor([0, 2, 2, 5, 6, 9, 9, 10, 12] + [15] * last)
    return torch.arange(15) % ROWS, offsets


def table(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(ROWS, DIM, **options)


def bag(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(ROWS, DIM, **{"mode": "sum", **options})


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, DIM))


def collection() -> nn.Module:
    return models.collection(models.table("table", ["f0"], DIM))


def hooked() -> nn.Module:
    made = nn.Embedding(ROWS, DIM)
    made.register_forward_hook(lambda module, given, output: output)
    return made


def without_gradients(t: Any, x: Any, *_: Any) -> torch.Tensor:
    with torch.no_grad():
        return t(x)


def plainly(t: Any, x: Any, *_: Any) -> torch.Tensor:
    return t(x)


SERVED = [
    Style("EmbeddingBagCollection(...)(kjt)", collection, lambda t, x, *_: t(x).values(), lambda: (models.jagged(["f0"], BATCH),)),
    Style("Embedding(R, d)(x), x (B,)", table(), plainly, one),
    Style("Embedding(R, d)(x), x (B, n), kept as a sequence", table(), plainly, some),
    Style("Embedding(R, d)(x).mean(1), x (B, n)", table(), lambda t, x, *_: t(x).mean(1), some),
    Style("Embedding(R, d)(x.t()), x (B, n)", table(), lambda t, x, *_: t(x.t()).transpose(0, 1), some),
    Style("Embedding(R, d)(x.view(-1)), x (B, n)", table(), lambda t, x, *_: t(x.view(-1)).view(-1, COUNT, DIM), some),
    Style(
        "Embedding(R, d)(x[:, i].long()), x a float matrix", table(), lambda t, x, *_: t(x[:, 1].long()), lambda: (ids(3) * 1.0,)
    ),
    Style("Embedding(R, d)(x + starts): one table for all fields", table(), lambda t, x, *_: t(x % 3 + START), some),
    Style("Embedding(R, d, padding_idx=0)(x)", table(padding_idx=0), plainly, some),
    Style("Embedding(R, d, max_norm=1.0)(x)", table(max_norm=1.0), plainly, one),
    Style("Embedding(R, d, sparse=True)(x)", table(sparse=True), plainly, one),
    Style("Embedding(R, d, dtype=torch.bfloat16)(x)", table(dtype=torch.bfloat16), plainly, one),
    Style("with torch.no_grad(): Embedding(R, d)(x)", table(), without_gradients, one),
    Style("EmbeddingBag(R, d, mode=...)(x), x (B, n)", bag(), plainly, some),
    Style("EmbeddingBag(R, d)(x, offsets)", bag(mode="mean"), lambda t, x, y, _: t(x, y), bags),
    Style(
        "EmbeddingBag(R, d, include_last_offset=True)(x, offsets)",
        bag(mode="max", include_last_offset=True),
        lambda t, x, y, _: t(x, y),
        lambda: bags(True),
    ),
    Style(
        "EmbeddingBag(R, d, mode='sum')(x, offsets, weights)",
        bag(),
        lambda t, x, y, z: t(x, y, z),
        lambda: (*bags(), torch.arange(15.0) + 0.5),
    ),
    Style("F.embedding(x, parameter), x (B, n)", parameter, lambda t, x, *_: F.embedding(x, t), some),
    Style("torch.embedding(parameter, x), x (B,)", parameter, lambda t, x, *_: torch.embedding(t, x), one),
    Style("F.embedding_bag(x, parameter), x (B, n)", parameter, lambda t, x, *_: F.embedding_bag(x, t), some),
]
REPLICATED = [
    Style("Embedding(n, d)(torch.arange(n)): a position", table(), lambda t, x, *_: t(torch.arange(x.shape[1])), some),
    Style(
        "Embedding(R, d)(ids computed from rows of a table)",
        table(),
        lambda t, x, *_: t((t(x).sum(-1).abs() * 3).long() % ROWS),
        one,
    ),
    Style("Embedding(R, d)(x) @ embedding.weight.t()", table(), lambda t, x, *_: t(x) @ t.weight.t(), one),
    Style("Embedding(R, d)(x[x > 0]): as many ids as the data has", table(), lambda t, x, *_: t(x[x > 0]).sum(0), some),
    Style("EmbeddingBag(R, d)(x.view(-1, 2)): not one bag per sample", bag(), lambda t, x, *_: t(x.view(-1, 2)), lambda: (ids(4),)),
    Style("Embedding(R, d, scale_grad_by_freq=True)(x)", table(scale_grad_by_freq=True), plainly, one),
    Style("Embedding(R, d)(x), with a hook on the module", hooked, plainly, one),
    Style(
        "F.embedding(x, integers).float()",
        lambda: nn.Parameter(torch.zeros(ROWS, DIM, dtype=torch.int8), requires_grad=False),
        lambda t, x, *_: F.embedding(x, t).float(),
        one,
    ),
    Style("parameter[x]: indexing", parameter, lambda t, x, *_: t[x], one),
]


def outcome(style: Style) -> tuple[str, ...]:
    """The row of a style: its code, and what became of it in a program that verifies."""
    torch.manual_seed(0)
    inputs = (ids(), *style.inputs())
    model = Reader(style.table(), style.read)
    program = towerize(model, Topology(2, 2), example_inputs=inputs)
    certificate = program.verify(*inputs, steps=0)
    assert certificate.passed, f"{style.code}\n{certificate}"
    reasons = [reason for name, reason in program.replicated.items() if name.startswith("table")]
    if reasons:
        return f"`{style.code}`", reasons[0].partition(": ")[2]
    found = [lookup for lookup in program.lookups.lookups if "table" in lookup.table]
    if not found:
        return f"`{style.code}`", "not seen as a lookup, and not listed in `program.replicated`"
    (lookup,) = found
    source = program.lookups.sources[lookup.source]
    given = {
        "keyed": "KeyedJaggedTensor",
        "offsets": "ids and offsets",
        "fixed": "1 per sample" if source.count == 1 else "n per sample",
    }[source.form]
    travels = "rows" if lookup.pooling == "rows" else f"pooled ({lookup.pooling})"
    n = lookup.dim // DIM
    return f"`{style.code}`", given, travels, "d" if n == 1 else "n * d"


def lines(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        assert len(row) == len(titles), row
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


TEXT = """\
# What becomes of a lookup

This file is written by `UPDATE_GOLDENS=1 pytest tests/test_plain_docs.py`. Every row is a model that was compiled and
verified for 2 hosts x 2 ranks. B is the number of samples, n the ids of one sample, R and d the table's rows and width.

## Served by the owner of the table

Ids go to the rank that owns the table. What the lookup itself pools is pooled there; rows that the model pools, attends
to or feeds to an RNN later travel as they are. n is a number of the compiled program: example inputs show it, and a batch
with another one is refused.

{served}

## Replicated on every rank

The table stays a dense parameter, as it would be under data parallelism: every rank holds it, and its gradient is
all-reduced. `program.replicated` and `print(program)` say which tables, where in your code and why.

{replicated}
"""


def document() -> str:
    served = lines(("written as", "ids", "what travels back", "columns"), [outcome(style) for style in SERVED])
    replicated = lines(("written as", "why"), [outcome(style) for style in REPLICATED])
    return TEXT.format(served="\n".join(served), replicated="\n".join(replicated))


@pytest.fixture(scope="module")
def made() -> str:
    return document()


def test_the_document_is_up_to_date(made: str) -> None:
    if os.environ.get("UPDATE_GOLDENS"):
        FILE.write_text(made)
    assert made == FILE.read_text(), f"{FILE.name} differs; UPDATE_GOLDENS=1 rewrites it"


def test_nothing_changes_sides(made: str) -> None:
    """A lookup that is no longer served shows even if the document was rewritten."""
    served, _, replicated = made.partition("## Replicated")
    assert all(f"`{style.code}`".replace("|", "\\|") in served for style in SERVED)
    assert all(f"`{style.code}`".replace("|", "\\|") in replicated for style in REPLICATED)
