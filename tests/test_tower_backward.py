"""Tower modules that are no plain layers, on real ranks: some without gradients, some that write to what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, copied, gradients_of, objective
from ranks import Ranks
from torch import nn
from tower_models import CASES, DIM

import dmt_compile
from dmt_compile import DistributedError, Topology
from dmt_compile.graphs import clone_with_parameters
from dmt_compile.verify.compare import furthest

pytestmark = pytest.mark.multi_rank


class Vectors(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.vectors, self.width = features, width
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


class Encoder(Vectors):
    """Trained elsewhere: nothing flows back through it."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.mix(x)


class Constant(Vectors):
    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        del self.mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x)


class Detached(Vectors):
    """Trained itself, but not what comes before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.detach())


class InPlace(Vectors):
    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.relu(x))


class Spare(Vectors):
    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.spare = nn.Linear(width, 3)


class Twice(nn.Module):
    """Vectors that a tower takes and that something else reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, DIM) for _ in range(4))
        self.items = nn.Embedding(11, DIM)
        self.top = nn.Linear(4 * DIM, 1)

    def forward(self, x: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        vectors = [table(x[:, i]) for i, table in enumerate(self.tables)]
        items = self.items(history)
        weight = sum((items * one.unsqueeze(1)).sum(2) for one in vectors)
        return self.top(torch.cat(vectors, dim=1).tanh()) + (torch.softmax(weight, dim=1).unsqueeze(2) * items).sum(
            (1, 2)
        ).unsqueeze(1)


MODULES: dict[str, Any] = {
    "encoder": {1: Encoder},
    "constant": {0: Constant},
    "detached": {1: Detached},
    "all without": Encoder,
    "in place": InPlace,
    "spare": Spare,
}


def _inputs(case: str, batch: int, seed: int) -> tuple[Any, ...]:
    if case == "dot":
        return CASES[case].inputs(batch, seed)
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (batch, 4), generator=draw), torch.randint(0, 11, (batch, 3), generator=draw)


def _program(case: str, module: str) -> dmt_compile.TowerProgram:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Twice() if case == "twice" else CASES[case].build()
    inputs = _inputs(case, 6, 7)
    return dmt_compile.towerize(model, Topology(2, 2), example_inputs=inputs, tower_module=MODULES[module], towers=2)


def step_on_ranks(case: str, module: str) -> tuple[Any, Any, Tensors]:
    """Runs on a rank: the output in evaluation, that of a step of training, and its gradients."""
    ranked = _program(case, module).distribute()
    inputs = _inputs(case, 1 + dist.get_rank() % 3, dist.get_rank())
    with torch.no_grad():
        evaluated = copied(ranked.eval()(*inputs))
    output = ranked.train()(*inputs)
    objective(output).backward()
    found = evaluated, copied(output), gradients_of(ranked)
    ranked.close()
    return found


@pytest.mark.parametrize(
    ("case", "module"),
    [
        ("dot", "encoder"),
        ("dot", "constant"),
        ("dot", "detached"),
        ("dot", "all without"),
        ("dot", "in place"),
        ("twice", "in place"),
    ],
)
def test_a_step_equals_one_device(ranks: Ranks, case: str, module: str) -> None:
    found = ranks(4, step_on_ranks, case, module)
    model = clone_with_parameters(_program(case, module).stages["model"].root)
    batches = [_inputs(case, 1 + rank % 3, rank) for rank in range(4)]
    outputs = [model(*batch) for batch in batches]
    (torch.stack([objective(output) for output in outputs]).sum() / 4).backward()
    for (evaluated, trained, _), output in zip(found, outputs, strict=True):
        for where, value in copied(output).items():
            torch.testing.assert_close(trained[where], value, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(evaluated[where], value, rtol=1e-4, atol=1e-5)
    mine = {name: value for _, _, part in found for name, value in part.items()}
    expected = gradients_of(model)
    # Tables that nothing flows back to on one device get zeros.
    beyond = mine.keys() - expected.keys()
    assert expected.keys() <= mine.keys() and not any(bool(mine[name].any()) for name in beyond)
    assert all(name.startswith("tables") for name in beyond)
    worst, name = furthest({name: mine[name] for name in expected}, expected)
    assert worst <= 1, (name, worst)


def test_simulated_ranks_do_the_same() -> None:
    assert _program("dot", "encoder").verify(*_inputs("dot", 9, 1)).passed
    assert _program("twice", "in place").verify(*_inputs("twice", 9, 1)).passed


def spare_on_ranks() -> str:
    """Runs on a rank: what the second step raises."""
    module = _program("dot", "spare").distribute()
    try:
        for step in range(2):
            module.zero_grad()
            objective(module(*_inputs("dot", 2, step))).backward()
    except DistributedError as error:
        return str(error)
    return ""


def test_a_parameter_that_a_module_never_uses_is_named(ranks: Ranks) -> None:
    found = ranks(4, spare_on_ranks)
    for rank, message in enumerate(found):
        assert f"'dmt_towers.{rank // 2}' of this rank's tower (Spare)" in message and "spare.weight, spare.bias" in message
        assert "distribute(find_unused_parameters=True)" in message
