"""Tables that are no parameters of the model: buffers, and modules that stand where torch does not look for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_models import BIG
from ranks import Ranks
from torch import nn

from dmt_compile import CaptureError, Topology, towerize

GRID = Topology(2, 2)


def ids(size: int, fields: int = 2) -> torch.Tensor:
    return (torch.arange(size * fields).reshape(size, fields) * 7) % BIG


class Kept(nn.Module):
    """A model whose tables stand in ``tables``, whatever that is."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(6, 1)

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.tables[i](x[:, i]) for i in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat(self.rows(x), dim=1))


class Buffers(Kept):
    def __init__(self) -> None:
        super().__init__(None)
        for i in range(2):
            self.register_buffer(f"table{i}", torch.randn(BIG, 3), persistent=bool(i))

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [F.embedding(x[:, 0], self.table0), F.embedding_bag(x[:, 1:], self.table1, mode="sum")]


def tables() -> list[nn.Embedding]:
    return [nn.Embedding(BIG, 3) for _ in range(2)]


class Inside(nn.Module):
    """In a layer of its own, beside a table that is spread."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = Kept(dict(enumerate(tables()))), nn.Embedding(BIG, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.table(x[:, 0])


class Bare(Kept):
    """Plain tensors, looked up by the function."""

    def __init__(self) -> None:
        super().__init__([torch.randn(BIG, 3) for _ in range(2)])

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [F.embedding(x[:, i], self.tables[i]) for i in range(2)]


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "list": (lambda: Kept(tables()), "register it .* ModuleList"),
    "dict": (lambda: Kept(dict(enumerate(tables()))), "register it .* ModuleList"),
    "tensors": (Bare, "register it"),
    "buffers": (Buffers, "the table is a buffer: make it an nn.Parameter"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_stay_on_every_rank(kind: str) -> None:
    make, why = KINDS[kind]
    model = make()
    with pytest.warns(UserWarning, match="the model is left flat") as caught:
        program = towerize(model, GRID, example_inputs=(ids(6),))
    assert len(program.replicated) == 2
    for name, reason in program.replicated.items():
        assert name in str(caught[0].message)
        where, _, rest = reason.partition(": ")
        assert where.rpartition(":")[0] == __file__ and re.match(f".*{why}", rest)
    assert f"  {2 * BIG * 3 * 4} B on each of 4 ranks; frozen, so no gradients" in str(program).split("\n")
    assert list(program.state_dict()) == list(model.state_dict())
    certificate = program.verify(ids(9))
    assert certificate.passed, str(certificate)


def test_beside_a_table_that_is_spread() -> None:
    model = Inside()
    program = towerize(model, GRID, example_inputs=(ids(6),))
    assert set(program.lookups.table) == {"table"} and len(program.replicated) == 2
    assert torch.equal(program(ids(5)), copy.deepcopy(model)(ids(5)))
    certificate = program.verify(ids(9))
    assert certificate.passed, str(certificate)


class Opaque(nn.Module):
    """Tables in a plain dict, in a layer that no front end can enter."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = dict(enumerate(tables()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self.tables[i](x[:, i]) for i in range(2)]
        return torch.cat(rows, dim=1) * (1.0 if float(rows[0].sum()) > 0 else 2.0)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = Opaque(), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.inner(x))


def test_out_of_sight() -> None:
    with pytest.raises(CaptureError, match=r"inner\.tables: ids are looked up in a tensor that is no parameter of the model"):
        towerize(Around(), GRID)
    with pytest.raises(CaptureError, match=r"in submodules that cannot be traced\.\n  inner: \S*test_no_parameters\.py:\d+"):
        towerize(Around(), GRID, example_inputs=(ids(6),))


def on_ranks() -> Any:
    """Runs on a rank: which has drawn other tables than the others, and begins with those of rank 0."""
    torch.manual_seed(torch.distributed.get_rank())
    found = []
    for make, _ in KINDS.values():
        with pytest.warns(UserWarning, match="left flat"):
            module = towerize(make(), Topology(2, 1), example_inputs=(ids(6),)).distribute()
        output = module(ids(4))
        output.sum().backward()
        found.append(output.detach().clone())
        module.close()
    return found


@pytest.mark.multi_rank
def test_ranks_begin_with_the_first_rank_s(ranks: Ranks) -> None:
    mine, theirs = ranks(2, on_ranks)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
