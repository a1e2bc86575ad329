"""Models and batches at the edge of what people have: unused tables, more towers than features, one sample, other devices."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import gradients_of, objective
from plain_models import BIG, CASES
from ranks import Ranks
from torch import nn

from dmt_compile import CaptureError, InputError, PassError, Topology, towerize
from dmt_compile.verify.compare import bits_differ

GRID = Topology(2, 2)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, BIG, shape, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    """One table that is read, and one that is not."""

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.unread = nn.Embedding(BIG, dim), nn.Embedding(BIG, dim)
        self.drop, self.norm, self.top = nn.Dropout(0.3), nn.BatchNorm1d(dim), nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.norm(self.drop(self.read(x))))


def test_a_table_that_nothing_reads() -> None:
    """It has no owner and costs no exchange; it stays in the state dict and out of the gradients."""
    model = Small()
    program = towerize(model, GRID, example_inputs=(ids(6),))
    assert set(program.lookups.table) == {"read"}
    assert list(program.state_dict()) == list(model.state_dict())
    certificate = program.verify(ids(9))
    assert certificate.passed, str(certificate)


def unread_on_ranks() -> tuple[bool, list[str]]:
    """Runs on a rank: whether the unread table is here as it was, and what got a gradient."""
    model = Small()
    module = towerize(model, Topology(2, 1), example_inputs=(ids(6),)).distribute()
    objective(module(ids(3 + dist.get_rank()))).backward()
    full = module.full_state_dict()
    found = torch.equal(full["unread.weight"], model.unread.weight), sorted(gradients_of(module))
    module.close()
    return found


@pytest.mark.multi_rank
def test_a_table_that_nothing_reads_on_ranks(ranks: Ranks) -> None:
    for same, gradients in ranks(2, unread_on_ranks):
        assert same
        assert "unread.weight" not in gradients


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_more_towers_than_features(towers: int) -> None:
    program = towerize(Small(), GRID, towers=towers, example_inputs=(ids(6),))
    assert len(program.plan.towers) == towers
    assert sum(bool(tower.features) for tower in program.plan.towers) == 1
    certificate = program.verify(ids(9))
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_narrow_tables(dim: int) -> None:
    certificate = towerize(Small(dim), GRID, example_inputs=(ids(6),)).verify(ids(9))
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize(("name", "kind"), zip(sorted(CASES), itertools.cycle([torch.int32, torch.int64])))
def test_a_batch_of_one(name: str, kind: torch.dtype) -> None:
    """On one device and on ranks of which all but one have no sample, in evaluation mode."""
    model = CASES[name].build().eval()
    program = towerize(model, Topology(1, 2), example_inputs=CASES[name].example())
    args, kwargs = CASES[name].batch(1, seed=3, ids=kind)
    with torch.no_grad():
        expected = copy.deepcopy(model)(*args, **kwargs)
        assert bits_differ(copy.deepcopy(program)(*args, **kwargs), expected) is None
        assert bits_differ(program.simulate(*args, **kwargs)[0], expected) is None


def test_modes_switch_dropout_and_batch_norm() -> None:
    model = Small()
    program = towerize(model, GRID, example_inputs=(ids(6),))
    for mode in (True, False, True):
        program.train(mode)
        model.train(mode)
        found = []
        for one in (program, model):
            buffers = copy.deepcopy(dict(model.named_buffers()))
            torch.manual_seed(1)
            found.append(one(ids(9)))
            model.load_state_dict(buffers, strict=False)
        assert bits_differ(*found) is None
    certificate = program.verify(ids(9))
    assert certificate.passed, str(certificate)


def test_a_table_on_another_device() -> None:
    """As the flat model does not run on its example inputs, nothing can be told of its ids."""
    model = Small()
    model.read.to("meta")
    with pytest.raises(CaptureError, match=r"the model does not run on example_inputs: .*device"):
        towerize(model, GRID, example_inputs=(ids(6),))
    model = model.to("meta")
    program = towerize(model, GRID, example_inputs=(ids(6).to("meta"),))
    assert set(program.lookups.table) == {"read"}
    with pytest.raises(InputError, match=r"on the meta device and has no values"):
        program.verify(ids(9))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_table_on_the_cpu_beside_layers_on_the_gpu() -> None:
    class Split(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(self.norm(self.drop(self.read(x).cuda())))

    model = Split().cuda()
    model.read.cpu()
    certificate = towerize(model, GRID, example_inputs=(ids(6),)).verify(ids(9))
    assert certificate.passed, str(certificate)


class Looping(nn.Module):
    """A loop over features that keeps what it finds in Python's dicts, lists, sets and generators."""

    def __init__(self) -> None:
        super().__init__()
        self.features = {"user": 3, "item": 2, "shop": 3}
        self.tables = nn.ModuleDict({name: nn.Embedding(BIG, dim) for name, dim in self.features.items()})
        self.top = nn.Linear(8, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, dim in sorted(self.features.items()):
            if name in batch:
                found.setdefault(dim, []).append((name, self.tables[name](batch[name])))
        columns = [rows for dim in sorted(found) for _, rows in reversed(found[dim])]
        return self.top(torch.cat(list(columns), dim=1)) + sum(rows.sum() * 0 for rows in {id(r): r for r in columns}.values())


def test_a_loop_over_features() -> None:
    def batch(size: int) -> dict[str, torch.Tensor]:
        return {"user": ids(size), "item": ids(size, 2)[:, 1], "shop": ids(size)}

    program = towerize(Looping(), GRID, example_inputs=(batch(6),))
    assert set(program.lookups.table) == {"tables.user", "tables.item", "tables.shop"}
    certificate = program.verify(batch(9))
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("kind", [torch.half, torch.bfloat16, torch.float64])
def test_other_types_of_tables(kind: torch.dtype) -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.bag = nn.Embedding(BIG, 3, dtype=kind), nn.EmbeddingBag(BIG, 2, mode="sum", dtype=kind)

        def forward(self, x: torch.Tensor) -> Any:
            return self.one(x).float().sum((1, 2)), self.bag(x)

    certificate = towerize(Typed(), GRID, example_inputs=(ids(6, 2),)).verify(ids(9, 2))
    assert certificate.passed, str(certificate)


class DropsRows(nn.Module):
    """Rows that are pooled at once in evaluation mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(BIG, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x)
        if self.training:
            rows = nn.functional.dropout(rows, 0.3)
        return self.top(rows.sum(1))


class MasksIds(nn.Module):
    """Ids of one table for all fields to which something else is done in training."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3 * BIG, 4)
        self.register_buffer("starts", torch.tensor([0, BIG, 2 * BIG]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.starts
        return self.table(x * torch.ones_like(x) if self.training else x)


@pytest.mark.parametrize("make", [DropsRows, MasksIds])
def test_modes_that_could_be_served_differently(make: Callable[[], nn.Module]) -> None:
    """What one mode does not allow the owner to do is not done in the other either."""
    model = make()
    program = towerize(model, GRID, example_inputs=(ids(6, 3),))
    assert [lookup.pooling for lookup in program.lookups.lookups] == ["rows"]
    for mode in (True, False):
        certificate = program.train(mode).verify(ids(9, 3))
        assert certificate.passed, str(certificate)


class Writes(nn.Module):
    """Writes to the ids between two lookups."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Embedding(BIG, 4), nn.Embedding(BIG, 4), write

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        rows = self.a(x.long())
        self.write(x)
        return (rows + self.b(x.long())).sum(1) + self.a(y).sum(1).relu_()


@pytest.mark.parametrize("write", [lambda x: x.mul_(0), lambda x: x[:, 0].zero_(), lambda x: x.view(-1).mul_(0.5)])
def test_writes_between_lookups_are_refused(write: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(PassError, match=r"test_hard_inputs\.py:\d+\) writes to what the lookup of .* without writing in place"):
        towerize(Writes(write), GRID, example_inputs=(ids(6, 3).float(), ids(6, 3)))


def test_writes_to_something_else_are_taken() -> None:
    program = towerize(Writes(lambda x: x + 1), GRID, example_inputs=(ids(6, 3).float(), ids(6, 3)))
    certificate = program.verify(ids(9, 3).float(), ids(9, 3))
    assert certificate.passed, str(certificate)


class OverAGraph(nn.Module):
    """A sparse matrix as a buffer, and a product with it that is not computed in memory of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(BIG, 3), nn.Parameter(torch.randn(BIG, 3))
        self.register_buffer("edges", torch.eye(BIG).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x) + torch.sparse.mm(self.edges, self.dense).sum(0)


def test_sparse_tensors_in_the_model() -> None:
    model = OverAGraph()
    program = towerize(model, GRID, example_inputs=(ids(6),))
    assert set(program.lookups.table) == {"table"}
    assert bits_differ(program(ids(9)), model(ids(9))) is None
