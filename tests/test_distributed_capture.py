"""Exported models, and models with a program for each mode, on real ranks."""

from __future__ import annotations

from typing import Any

import export_models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_cases import by_table, copied, flat_step, gradients_of, merged, objective
from export_models import given
from ranks import Ranks
from torch import nn

from dmt_compile import DistributedError, Topology, towerize
from dmt_compile.graphs import clone_with_parameters
from dmt_compile.verify.compare import bits_differ, furthest

pytestmark = pytest.mark.multi_rank

GRID = Topology(2, 2)
SIZES = [3, 2, 4, 2]


class TwoModes(export_models.Matrix):
    """Loss and prediction in training, the prediction in evaluation, and a layer that only one of the modes uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for rows in export_models.FIELDS)
        self.both, self.in_training, self.in_evaluation = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        rows = F.hardtanh(sum(table(x[:, i]) for i, table in enumerate(self.tables)), -9, 9)
        if self.training:
            return self.in_training(rows).squeeze(1), self.both(rows)
        return self.both(rows) + self.in_evaluation(rows)


def build(name: str) -> Any:
    torch.manual_seed(0)
    return TwoModes() if name == "TwoModes" else getattr(export_models, name)()


def steps_on_ranks(name: str) -> Any:
    """Runs on a rank: outputs and gradients of a step in each mode, training first and last, and the full state dict."""
    model = build(name)
    program = towerize(model, GRID, example_inputs=given(model, 6))
    module = program.distribute()
    steps = []
    for seed, training in enumerate((True, False, True)):
        module.train(training)
        module.zero_grad()
        output = module(*given(model, SIZES[dist.get_rank()], 10 * seed + dist.get_rank()))
        objective(output).backward()
        steps.append((copied(output), by_table(gradients_of(module), program.lookups, module._context.bases)))
    full = module.full_state_dict()
    module.close()
    return steps, full


@pytest.mark.parametrize("name", ["TwoModes", "FieldAware", "Recurrent", "ByKeys", "Nested"])
def test_steps_in_both_modes(ranks: Ranks, name: str) -> None:
    found = ranks(4, steps_on_ranks, name)
    model = build(name)
    lookups = towerize(model, GRID, example_inputs=given(model, 6)).lookups
    for seed, training in enumerate((True, False, True)):
        model = clone_with_parameters(build(name)).train(training)
        batches = [given(model, size, 10 * seed + rank) for rank, size in enumerate(SIZES)]
        torch.manual_seed(0)
        flat = flat_step(model, batches, SIZES)
        if name not in ("ByKeys", "Nested") or not training:  # Those draw random numbers in training.
            assert bits_differ([steps[seed][0] for steps, _ in found], flat.outputs) is None
            gradients = merged([steps[seed][1] for steps, _ in found], set(lookups.table))
            worst, parameter = furthest(gradients, by_table(flat.gradients, lookups))
            assert worst <= 1, (parameter, worst)
    for _, full in found:
        assert list(full) == list(build(name).state_dict())


def disagree() -> str:
    """Runs on a rank: the ranks' programs differ in evaluation only."""
    model = build("TwoModes")
    if dist.get_rank() == 1:
        forward = type(model).forward

        class Other(TwoModes):
            def forward(self, x: torch.Tensor) -> Any:
                found = forward(self, x)
                return found if self.training else found + 1

        model.__class__ = Other
    try:
        towerize(model, GRID, example_inputs=given(model, 6)).distribute()
    except DistributedError as error:
        return str(error)
    return ""


def test_ranks_with_another_graph_for_evaluation(ranks: Ranks) -> None:
    for message in ranks(4, disagree):
        assert "graph in evaluation" in message, message
