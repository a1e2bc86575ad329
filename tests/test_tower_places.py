"""Tower modules of other types, on other devices, under odd numbers; seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmt_compile import DLRMTower, InputError, PlanError, Topology, towerize

TWO, DIM = Topology(2, 1), 8
INPUTS = (torch.arange(28).reshape(7, 4) % 9,)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, DIM) for _ in range(4))
        self.top = nn.Linear(4 * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1))


class Own(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.vectors, self.width, self.mix = features, width, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


class Plain(nn.Module):
    """A tensor that no cast of the module reaches."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.vectors, self.width, self.scale = features, width, torch.ones(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Mapped(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.diag(self.scale)


class Doubling(Own):
    """Writes to what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.mul_(2).add_(1))


def compiled(module: Any, model: nn.Module | None = None, **more: Any) -> Any:
    return towerize(model or Model(), TWO, example_inputs=INPUTS, tower_module=module, **more)


def _meta(features: int, width: int) -> nn.Module:
    with torch.device("meta"):
        return Own(features, width)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another type, given": (
        lambda: compiled([Own(2, DIM).double(), Own(2, DIM)]),
        r"tower 0 .*Own does not take vectors of torch.float32.*holds torch.float64: move it with module.to\(torch.float32\)",
    ),
    "a plain tensor": (
        lambda: compiled(Plain, Model().bfloat16()),
        r"tower 0 .*Plain takes torch.bfloat16 and returns torch.float32.*parameters or buffers",
    ),
    "a plain matrix": (
        lambda: compiled(Mapped, Model().bfloat16()),
        r"tower 0 .*Mapped does not take vectors of torch.bfloat16.*parameters or buffers",
    ),
    "without values": (lambda: compiled(_meta), r"tower 0 .*'mix.weight' of Own is on the meta device.*tables are on cpu"),
    "without values, given": (lambda: compiled([Own(2, DIM), _meta(2, DIM)]), r"tower 1 .*'mix.weight' of Own is on the meta"),
    "given, for tables without values": (
        lambda: towerize(Model().to("meta"), TWO, example_inputs=(INPUTS[0].to("meta"),), tower_module=[Own(2, DIM), Own(2, DIM)]),
        r"tower 0 .*'mix.weight' of Own is on cpu, but the tables are on meta",
    ),
    "True for a tower": (lambda: compiled({True: DLRMTower(1, 0, 4)}), r"names tower True, the plan has towers 0 to 1"),
    **{
        f"seed {seed!r}": (lambda seed=seed: compiled(DLRMTower(1, 0, 4), seed=seed), "seed must be")
        for seed in (2**64, 2**63, -(2**63) - 1, "a", None, 1.5, [1])
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), np.int64(3), torch.tensor(3)])
def test_seeds(seed: Any) -> None:
    program = compiled(DLRMTower(1, 0, 4), seed=seed)
    assert program.get_parameter("top.weight").equal(compiled(DLRMTower(1, 0, 4), seed=int(seed)).get_parameter("top.weight"))
    with pytest.raises(InputError, match="seed must be"):
        program.verify(*INPUTS, seed=2**64)


@pytest.mark.parametrize("expand", [False, True])
def test_a_module_may_write_to_what_it_is_given(expand: bool) -> None:
    program = compiled(Doubling, expand=expand)
    before = program.get_parameter("tables.0.weight").detach().clone()
    program(*INPUTS).sum().backward()
    assert program.get_parameter("tables.0.weight").equal(before)
    assert program.verify(*INPUTS).passed
