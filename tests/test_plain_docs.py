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
from torchrec import EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingConfig

from dmt_compile import CaptureError, Topology, towerize
from dmt_compile.capture import symbolic

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


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Embedding(ROWS, DIM), nn.GRU(DIM, 2, batch_first=True))


def masked(t: Any, x: Any, *_: Any) -> torch.Tensor:
    return (t(x) * (x > 2).unsqueeze(-1)).sum(1)


def attended(t: Any, x: Any, *_: Any) -> torch.Tensor:
    rows = t(x)
    return (torch.softmax(rows @ rows[:, :1].transpose(1, 2), dim=1) * rows).sum(1)


def fielded(t: Any, x: Any, *_: Any) -> torch.Tensor:
    return t(x + START)


def small() -> tuple[Any, ...]:
    return (ids(COUNT) % 3,)


def chained(t: Any, x: Any, *_: Any) -> torch.Tensor:
    return t((t(x).sum(-1).abs() * 3).long() % ROWS)


def in_pairs(t: Any, x: Any, *_: Any) -> torch.Tensor:
    return t(x.reshape(-1, 2)).reshape(-1, 2, DIM)


SERVED = [
    Style("EmbeddingBagCollection(...)(kjt)", collection, lambda t, x, *_: t(x).values(), lambda: (models.jagged(["f0"], BATCH),)),
    Style("Embedding(R, d)(x), x (B,)", table(), plainly, one),
    Style("Embedding(R, d)(x), x (B, n), kept as a sequence", table(), plainly, some),
    Style("Embedding(R, d)(x).mean(1), x (B, n)", table(), lambda t, x, *_: t(x).mean(1), some),
    Style("Embedding(R, d)(x).max(1).values, x (B, n)", table(), lambda t, x, *_: t(x).max(1).values, some),
    Style("(Embedding(R, d)(x) * mask).sum(1), mask (B, n, 1)", table(), masked, some),
    Style("Embedding(R, d)(x), attended by another embedding", table(), attended, some),
    Style("GRU(Embedding(R, d)(x))", recurrent, lambda t, x, *_: t(x)[0], some),
    Style("Embedding(R, d)(x.t()), x (B, n)", table(), lambda t, x, *_: t(x.t()).transpose(0, 1), some),
    Style("Embedding(R, d)(x.view(-1)), x (B, n)", table(), lambda t, x, *_: t(x.view(-1)).view(-1, COUNT, DIM), some),
    Style(
        "Embedding(R, d)(x[:, i].long()), x a float matrix", table(), lambda t, x, *_: t(x[:, 1].long()), lambda: (ids(3) * 1.0,)
    ),
    Style("Embedding(R, d)(x + starts): one table for all fields, a run of rows for each", table(), fielded, small),
    Style("Embedding(R, d)(x), starts added to x before", table(), lambda t, x, *_: t(x), lambda: (ids(COUNT) % 3 + START,)),
    Style("EmbeddingBag(R, d)(x + starts): bags over all fields", bag(), fielded, small),
    Style("Embedding(R, d)(x[x > 0]): as many ids as the data has", table(), lambda t, x, *_: t(x[x > 0]).sum(0), some),
    Style("Embedding(R, d)(ids computed from rows of a table)", table(), chained, one),
    Style("Embedding(R, d, padding_idx=0)(x)", table(padding_idx=0), plainly, some),
    Style("Embedding(R, d, max_norm=1.0)(x)", table(max_norm=1.0), plainly, one),
    Style("Embedding(R, d, sparse=True)(x)", table(sparse=True), plainly, one),
    Style("Embedding(R, d, dtype=torch.bfloat16)(x)", table(dtype=torch.bfloat16), plainly, one),
    Style("with torch.no_grad(): Embedding(R, d)(x)", table(), without_gradients, one),
    Style("EmbeddingBag(R, d, mode=...)(x), x (B, n)", bag(), plainly, some),
    Style("EmbeddingBag(R, d)(x.view(-1, 2)): several bags per sample", bag(), in_pairs, lambda: (ids(4),)),
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
    Style("parameter[x], x (B, n)", parameter, lambda t, x, *_: t[x], some),
    Style("parameter.index_select(0, x), x (B,)", parameter, lambda t, x, *_: t.index_select(0, x), one),
    Style(
        "EmbeddingCollection(...)(kjt)",
        lambda: EmbeddingCollection(tables=[EmbeddingConfig(ROWS, DIM, name="table", feature_names=["f0"])]),
        lambda t, x, *_: t(x)["f0"].values(),
        lambda: (models.jagged(["f0"], BATCH, rows=ROWS),),
    ),
]
REPLICATED = [
    Style("Embedding(n, d)(torch.arange(n)): a position", table(), lambda t, x, *_: t(torch.arange(x.shape[1])), some),
    Style("Embedding(R, d)(x) @ embedding.weight.t()", table(), lambda t, x, *_: t(x) @ t.weight.t(), one),
    Style("Embedding(R, d, scale_grad_by_freq=True)(x)", table(scale_grad_by_freq=True), plainly, one),
    Style("Embedding(R, d)(x), with a hook on the module", hooked, plainly, one),
    Style(
        "F.embedding(x, integers).float()",
        lambda: nn.Parameter(torch.zeros(ROWS, DIM, dtype=torch.int8), requires_grad=False),
        lambda t, x, *_: F.embedding(x, t).float(),
        one,
    ),
    Style("F.embedding(x, buffer)", lambda: nn.Buffer(torch.randn(ROWS, DIM)), lambda t, x, *_: F.embedding(x, t), one),
]


FRONT_ENDS = ("torch.fx", "torch.export")


def outcomes(style: Style) -> list[tuple[str, ...]]:
    """What became of a style in a program that verifies, by front end."""
    found = []
    for front_end in FRONT_ENDS:
        with pytest.MonkeyPatch.context() as patch:
            if front_end != "torch.fx":
                patch.setattr(symbolic._Tracer, "trace", _refuse_to_trace)
            found.append(outcome(style, front_end))
    return found


def _refuse_to_trace(*_: Any, **__: Any) -> Any:
    raise TypeError("symbolic tracing is switched off")


def outcome(style: Style, front_end: str) -> tuple[str, ...]:
    """Replicated and why; or how ids are given, what travels back, and how wide it is for one row of ids or one sample."""
    torch.manual_seed(0)
    inputs = (ids(), *style.inputs())
    model = Reader(style.table(), style.read)
    try:
        program = towerize(model, Topology(2, 2), example_inputs=inputs)
    except CaptureError as error:
        # Without the place in this file and the line quoted from it.
        return ("refused", str(error).strip().splitlines()[-1].rpartition("`: ")[2].strip())
    assert program._dmt.captured.front_end == front_end
    certificate = program.verify(*inputs, steps=0)
    assert certificate.passed, f"{style.code}\n{certificate}"
    reasons = [reason for name, reason in program.replicated.items() if name.startswith("table")]
    if reasons:
        return ("replicated", reasons[0].partition(": ")[2])
    found = [lookup for lookup in program.lookups.lookups if "table" in lookup.table]
    assert found, style.code
    rounds = sorted({program.lookups.sources[lookup.source].round for lookup in found})
    lookup = found[0]
    source = program.lookups.sources[lookup.source]
    if source.unit != "sample":
        given = f"any number of {source.unit}s"
    elif source.form == "fixed":
        several = f"1 per sample, {len(found)} fields" if len(found) > 1 else "1 per sample"
        given = {0: "any number per sample", 1: several}.get(source.count, "n per sample")
    else:
        given = {"keyed": "KeyedJaggedTensor", "offsets": "ids and offsets"}[source.form]
    travels = "sequence" if lookup.pooling == "rows" and lookup.dim > DIM else "row" if lookup.pooling == "rows" else "pooled"
    how = "" if lookup.pooling == "rows" else f" ({lookup.pooling}{', weighted' if lookup.weighted else ''})"
    apart = f", round {rounds[-1] + 1}" if rounds[-1] else ""
    return ("served", given, travels + how + apart)


def row(style: Style) -> tuple[str, ...]:
    """The row of a style: its code, what each front end makes of it, and how its rows travel."""
    found = outcomes(style)
    works = {"served": "works", "replicated": "works", "refused": "refused"}
    same = found[0] if found[0][0] == found[1][0] else next(one for one in found if one[0] == "served")
    last = found[1][1] if found[1][0] == "refused" else ""
    cells = [f"`{style.code}`", *(works[one[0]] for one in found), *same[1:]]
    if last:
        cells[2] = f"refused: {last}"
    return tuple(cells)


def lines(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        assert len(row) == len(titles), row
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


TEXT = """\
# What becomes of a lookup

This file is written by `UPDATE_GOLDENS=1 pytest tests/test_plain_docs.py`. Every row is a model that was compiled and
verified for 2 hosts x 2 ranks, once as torch.fx traces it and once as torch.export does. B is the number of samples, n the
ids of one sample, R and d the table's rows and width.

## Served by the owner of the table

Ids go to the rank that owns the table, or that run of its rows. What the lookup itself pools is pooled there, and so are rows
that the model sums, averages or takes the maximum of at once; rows that it attends to, feeds to an RNN or looks at in another way
travel as they are. The number of ids of one sample may change from batch to batch and from rank to rank where the model itself
takes any number, which is tried when it is compiled; else, and in what torch.export captures, it is that of the example.
`dynamic_ids=False` keeps it at that everywhere. Lookups whose ids need another lookup, and those that make a row for each of any
number of ids or bags, have further rounds of exchanges.

{served}

## Replicated on every rank

The table stays as it would under data parallelism: every rank holds it, and its gradient, if it is a parameter, is
all-reduced. `program.replicated` and `print(program)` say which tables, where in your code and why. Where no other table is
left, the model is left flat: the program is the model itself on every rank, trained data-parallel.

{replicated}
"""


def document() -> str:
    served = lines(("written as", *FRONT_ENDS, "ids", "what travels back"), [row(style) for style in SERVED])
    replicated = lines(("written as", *FRONT_ENDS, "why"), [row(style) for style in REPLICATED])
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
