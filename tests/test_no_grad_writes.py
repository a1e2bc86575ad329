"""Writes under ``torch.no_grad()`` inside forward: gradients do not see them, by either door."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_models import fresh
from torch import nn

from dmt_compile import Topology, towerize


def scaled(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        rows.mul_(3)
    return rows


def through_a_view(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        column = rows[:, 0]
        column *= 3
    return rows


def returned(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        written = rows.mul_(3)
    return written


def chained(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        written = rows.mul_(2).add_(1)
    return written


def added(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """The statement, for which a traced value would take the sum."""
    with torch.no_grad():
        rows += 1
    return rows


def put_elsewhere(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        twice = torch.mul(rows, 2, out=torch.empty_like(rows))
    return rows + twice


def normed(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Writes to its statistics, and returns something else."""
    with torch.no_grad():
        beside = nn.functional.batch_norm(rows, model.average, model.spread, training=True)
    return rows + beside


def set_item(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        rows[:, 1] = rows[:, 2] * 2
    return rows


def averaged(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """A codebook's moving average: a buffer that is written from values with gradients."""
    with torch.no_grad():
        model.average.mul_(0.9).add_(rows.mean(0), alpha=0.1)
    return rows - model.average.clone()


def clamped(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.top.weight.clamp_(-0.1, 0.1)
    return rows


class Writing(nn.Module):
    def __init__(self, write: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.top = nn.Embedding(12, 4), nn.Embedding(12, 4), nn.Linear(4, 1)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.write(self, self.one(x) * 1.0) + self.two(x))


KINDS = [scaled, through_a_view, returned, chained, added, put_elsewhere, normed, set_item, averaged, clamped]


@pytest.mark.parametrize("door", ["towerize", "torch.compile"])
@pytest.mark.parametrize("write", KINDS)
def test_gradients_are_the_flat_model_s(write: Any, door: str) -> None:
    torch.manual_seed(0)
    model, x = Writing(write), torch.arange(6)
    flat = copy.deepcopy(model)
    fresh()
    run: Any = (
        towerize(model, Topology(2, 1), example_inputs=(x,))
        if door == "towerize"
        else torch.compile(model, backend="dmt", options={"inner": "aot_eager", "topology": Topology(2, 1)}, fullgraph=True)
    )
    for _ in range(2):
        found, expected = run(x), flat(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
    for mine, theirs in zip(model.parameters(), flat.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine.grad is not None and torch.equal(mine.grad, theirs.grad)
    # Where forward writes to a parameter, the flat models of several ranks cannot run side by side in one process.
    if door == "towerize" and write is not clamped:
        certificate = run.verify(x)
        assert certificate.passed, str(certificate)
