"""What re-sized layers draw again, as their class does, leaves all else what it is in the flat model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmt_compile import DLRMTower, Topology, TowerProgram, towerize
from dmt_compile.towers.model import TowerModel

TWO, DIM, FIELDS = Topology(2, 1), 8, 4
INPUTS = (torch.arange(28).reshape(7, FIELDS) % 9,)


class Fields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, DIM) for _ in range(FIELDS))

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1)


class Attention(Fields):
    """Its class sets the bias of a layer inside it to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, kdim=DIM, vdim=DIM, batch_first=True)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = self.columns(x).view(-1, FIELDS, DIM)
        return self.attention(self.query.expand(e.shape[0], 1, 16), e, e, need_weights=False)[0].sum((1, 2))


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(size)), nn.Linear(DIM, 1)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 3.0, 0.1)
        self.out.reset_parameters()

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        return e * self.weight


class Child(Fields):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mid = Scale(FIELDS * DIM), nn.Linear(FIELDS * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale.out(self.mid(self.scale(self.columns(x))).relu())


class Root(Fields):
    """Draws everything, its tables too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top = nn.Parameter(torch.randn(FIELDS * DIM)), nn.Linear(FIELDS * DIM, 1)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.columns(x) * self.weight)


class Beside(nn.Module):
    """Tables beside a parameter that is re-sized."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(9, DIM)), nn.Parameter(torch.randn(9, DIM))
        self.weight = nn.Parameter(torch.randn(2 * DIM, 1))

    def reset_parameters(self) -> None:
        for parameter in (self.a, self.b, self.weight):
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a[x[:, 0]], self.b[x[:, 1]]], dim=1) @ self.weight


MODELS: dict[str, Callable[[], nn.Module]] = {"attention": Attention, "child": Child, "root": Root, "beside": Beside}


def compiled(model: nn.Module, module: Any, **more: Any) -> TowerProgram:
    return towerize(model, TWO, example_inputs=INPUTS, tower_module=module, **more)


def made(program: TowerProgram) -> TowerModel:
    found = program.tower_model
    assert found is not None and found.way == "re-sized", found
    return found


@pytest.mark.parametrize("options", [{}, {"init": "preserve"}])
@pytest.mark.parametrize("name", MODELS)
def test_the_flat_model_keeps_its_values_and_shares_what_keeps_its_shape(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    program = compiled(model, DLRMTower(0, 1, 4) if name == "beside" else DLRMTower(1, 0, 4), **options)
    changed = set(made(program).resized)
    assert changed and not made(program).undrawn
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    mine, its = dict(program.named_parameters()), dict(model.named_parameters())
    if not options:
        assert {key for key in its if mine[key] is its[key]} == set(its) - changed
    else:
        assert all(mine[key] is its[key] for key in its if "tables" in key or key in ("a", "b"))


def test_a_class_draws_its_own_tensors() -> None:
    program = compiled(Child(), DLRMTower(1, 0, 4))
    weight = program.get_parameter("scale.weight")
    assert weight.shape == (FIELDS * 4,) and abs(float(weight.detach().mean()) - 3) < 0.2
    assert compiled(Child(), DLRMTower(1, 0, 4)).get_parameter("scale.weight").equal(weight)


class Drawn(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.randn(size))

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        return e * self.weight


class Asks(Drawn):
    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)


class CopiesItsOldSize(Drawn):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(self.size).float())


class TakesItsOldSize(Drawn):
    def reset_parameters(self) -> None:
        self.weight.data = torch.randn(self.size)


class Plain(Fields):
    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        self.scale, self.top = scale, nn.Linear(FIELDS * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.scale(self.columns(x)).relu())


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Asks, r"raises TypeError: .*missing 1 required positional argument: 'std'"),
        (CopiesItsOldSize, r"raises RuntimeError"),
        (TakesItsOldSize, r"makes \(32,\) of 'weight', not \(16,\)"),
    ],
)
def test_a_class_that_cannot_draw_another_size(layer: type[Drawn], why: str) -> None:
    model = Plain(layer(FIELDS * DIM))
    program = compiled(model, DLRMTower(1, 0, 4))
    assert program.get_parameter("scale.weight").shape == (FIELDS * 4,)
    assert list(made(program).undrawn) == ["scale"]
    assert re.search(why, made(program).undrawn["scale"])
    assert f"'scale' is drawn from a normal distribution: {layer.__name__}.reset_parameters()" in " ".join(str(program).split())
    kept = made(compiled(model, DLRMTower(1, 0, 4), init="preserve"))
    assert not kept.undrawn or "scale.weight" in kept.redrawn
