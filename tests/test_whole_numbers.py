"""Gradients of every parameter, dense layers too, bit for bit: whole numbers make every sum exact in any order."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from torch import nn

from dmt_compile import Topology, towerize
from dmt_compile.verify.deal import deal

GRIDS = [(Topology(2, 2), None), (Topology(3, 2), 3), (Topology(4, 2), 2), (Topology(2, 4), 4)]


class Plain(nn.Module):
    """Float64 throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 3), nn.Embedding(7, 2)
        self.layers = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
        self.double()

    def forward(self, user: torch.Tensor, items: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.user(user), self.item(items).sum(dim=1), dense], dim=1))


class Collection(nn.Module):
    """TorchRec casts pooled rows to float32, where whole numbers below 2**24 are exact as well."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = models.PooledOnly(models.table("a", ["x"], 3), models.table("b", ["y"], 2))
        self.layers = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, sparse: Any, dense: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.pooled(sparse), dense], dim=1))


def _whole(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return model


def _inputs(model: nn.Module, batch: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    dense = torch.randint(-2, 3, (batch, 4), generator=generator)
    if isinstance(model, Plain):
        ids = torch.randint(0, 7, (batch, 3), generator=generator)
        return ids[:, 0], ids, dense.double()
    return models.jagged(("x", "y"), batch), dense.float()


@pytest.mark.parametrize("topology, towers", GRIDS)
@pytest.mark.parametrize("batch", [24, 13, 3])
@pytest.mark.parametrize("kind", [Plain, Collection])
def test_every_gradient_has_the_flat_models_bits(kind: type[nn.Module], batch: int, topology: Topology, towers: int | None) -> None:
    model = _whole(kind())
    flat, given, world = copy.deepcopy(model), _inputs(model, batch), topology.world_size
    program = towerize(model, topology, towers=towers, example_inputs=given)
    generator = torch.Generator().manual_seed(2)
    dealt = deal(given, {}, world)
    sizes = [args[-1].shape[0] for args, _ in dealt]
    # Multiples of the world size, so that the mean over ranks is whole too.
    cotangents = [world * torch.randint(-2, 3, (size, 2), generator=generator).to(next(model.parameters())) for size in sizes]
    outputs = program.simulate(*given)
    sum((out * own).sum() for out, own in zip(outputs, cotangents, strict=True)).backward()
    reference = [(flat(*args) * own).sum() for (args, _), own, size in zip(dealt, cotangents, sizes, strict=True) if size]
    (torch.stack(reference).sum() / world).backward()
    tables = {table.parameter for table in program.lookups.tables}
    found = dict(model.named_parameters())
    assert any(bool(parameter.grad.any()) for name, parameter in found.items() if name not in tables)
    for name, parameter in flat.named_parameters():
        gradient = found[name].grad
        # Dense gradients are averaged after backward on real ranks; here the ranks share one set of dense parameters.
        gradient = gradient if name in tables else gradient / world
        assert torch.equal(gradient, gradient.round()), name
        assert torch.equal(gradient, parameter.grad), name
