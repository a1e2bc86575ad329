"""A torch.autograd.Function has a backward of its own, which graphs have not: it runs in a submodule that is kept whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import line_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmt_compile import CaptureError, Topology, towerize

TOPOLOGY = Topology(2, 2)


class Threefold(torch.autograd.Function):
    """Twice its input, as if it were three times."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * grad


class Reverse(torch.autograd.Function):
    """Adds no node to a graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


# Looked up before anything is captured, as libraries do.
threefold = Threefold.apply


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Model(nn.Module):
    """``how`` says which front end takes it; ``layer`` is applied in a submodule, ``function`` in the model itself."""

    def __init__(self, how: str, layer: Any = None, function: Any = None) -> None:
        super().__init__()
        self.how, self.function = how, function
        self.first, self.second, self.out = nn.Embedding(10, 4), nn.Embedding(10, 4), nn.Linear(8, 1)
        self.layer = Apply(layer) if layer is not None else nn.Identity()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first(a), self.second(b)], 1)
        if self.how == "export" and a.dtype.itemsize != 8:
            x = x * 2
        if self.how == "strict":
            x = x + torch.from_numpy(a.numpy() % 3).unsqueeze(1)
        if self.function is not None:
            x = self.function(x)
        return self.out(self.layer(x))


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 10, (12,)), torch.randint(0, 10, (12,))


@pytest.mark.parametrize("how, front_end", [("fx", "torch.fx"), ("export", "torch.export"), ("strict", "torch.export")])
@pytest.mark.parametrize("function", [Threefold.apply, threefold, Reverse.apply])
def test_submodule_is_kept_whole(how: str, front_end: str, function: Any) -> None:
    program = towerize(Model(how, function), TOPOLOGY, example_inputs=pair())
    assert program._dmt.captured.front_end == front_end
    name = function.__self__.__name__
    where = f"{__file__}:{line_of(Apply.forward, 'self.function(x)')}: `return self.function(x)`: "
    assert program.leaves == {
        "layer": f"{where}forward applies {name}, a torch.autograd.Function, whose backward a graph would lose"
    }
    certificate = program.verify(*pair())
    assert certificate.passed, str(certificate)


@pytest.mark.parametrize("how", ["fx", "export", "strict"])
@pytest.mark.parametrize("function", [threefold, Reverse.apply])
def test_refused_beside_lookups(how: str, function: Any) -> None:
    where = f"{__file__}:{line_of(Model.forward, 'self.function(x)')}: `x = self.function(x)`: forward applies "
    with pytest.raises(CaptureError) as caught:
        towerize(Model(how, function=function), TOPOLOGY, example_inputs=pair())
    assert where in str(caught.value)
    assert str(caught.value).endswith("Apply it in a submodule of its own that holds no lookup (it is then kept whole).")


def test_no_backward_to_lose() -> None:
    def still(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * threefold(x)

    program = towerize(Model("fx", function=still), TOPOLOGY, example_inputs=pair())
    assert program.leaves == {} and program.verify(*pair()).passed
    assert "apply" not in torch.autograd.Function.__base__.__dict__


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=reentrant)

    if reentrant:
        with pytest.raises(CaptureError, match=r"applies CheckpointFunction(.|\n)*Checkpoint with use_reentrant=False\.$"):
            towerize(Model("fx", function=checkpointed), TOPOLOGY, example_inputs=pair())
        return
    assert towerize(Model("fx", function=checkpointed), TOPOLOGY, example_inputs=pair()).verify(*pair()).passed


class Hidden(Apply):
    """Reads a table in a way that only running it shows."""

    def __init__(self) -> None:
        super().__init__(threefold)
        self.table = nn.Parameter(torch.rand(10, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x + nn.functional.embedding(torch.zeros(len(x), dtype=torch.long), self.table))


def test_nothing_to_keep_whole_where_a_lookup_is() -> None:
    model = Model("export")
    model.layer = Hidden()
    with pytest.raises(CaptureError, match=r"what must stay whole holds a lookup\.\n  layer: (.|\n)*applies Threefold"):
        towerize(model, TOPOLOGY, example_inputs=pair())


@pytest.mark.parametrize("how", ["export", "strict"])
def test_kept_submodule_with_layers(how: str) -> None:
    class Projected(Apply):
        def __init__(self) -> None:
            super().__init__(threefold)
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(self.inner(x)) + x

    model = Model(how)
    model.layer = Projected()
    program = towerize(model, TOPOLOGY, example_inputs=pair())
    assert list(program.leaves) == ["layer"] and program.verify(*pair()).passed
