"""Warm starts: the flat model's results where nothing is compressed, or vectors brought back to their old width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dmt_compile import CrossTower, DLRMTower, PassThrough, PlanError, Topology, towerize
from dmt_compile.towers.model import TowerModel

TWO, DIM, FIELDS = Topology(2, 1), 8, 4
INPUTS = (torch.randint(0, 9, (64, FIELDS), generator=torch.Generator().manual_seed(0)),)


class Model(nn.Module):
    """``top`` over the vectors of all fields, one after the other, by ``mix``."""

    def __init__(self, mix: Callable[[Any, torch.Tensor], torch.Tensor], columns: int, widths: tuple[int, ...] = (DIM,) * FIELDS):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, width) for width in widths)
        self.top, self.other, self.mix = nn.Linear(columns, 3), nn.Linear(columns, 3), mix
        self.conv = nn.Conv2d(1, 3, (3, 1), padding=(1, 0))
        self.each = nn.Parameter(torch.zeros(FIELDS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = [table(x[:, i]) for i, table in enumerate(self.tables)]
        return self.mix(self, vectors).relu().sum(1)


def _stacked(mix: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    return lambda self, vectors: mix(self, torch.stack(vectors, 1))


def _squares(self: Any, e: torch.Tensor) -> torch.Tensor:
    return 0.5 * (e.sum(1).square() - e.square().sum(1))


def _reversed(self: Any, vectors: list[torch.Tensor]) -> torch.Tensor:
    return self.top(torch.cat(vectors, 1)) + self.other(torch.cat(vectors[::-1], 1))


def _weighted(self: Any, e: torch.Tensor) -> torch.Tensor:
    """What is weighted by field counts for nothing here, the rest cannot be kept."""
    return self.top(e.sum(1)) + (e.sum(-1) * self.each).sum(1, keepdim=True)


def _conv(self: Any, e: torch.Tensor) -> torch.Tensor:
    return self.top(self.conv(e.unsqueeze(1)).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "summed": lambda: Model(_stacked(lambda self, e: self.top(e.sum(1))), DIM),
    "averaged": lambda: Model(_stacked(lambda self, e: self.top(e.mean(1))), DIM),
    "sum of squares": lambda: Model(_stacked(_squares), DIM),
    "normalised": lambda: Model(_stacked(lambda self, e: self.top(functional.normalize(e, dim=-1).flatten(1))), FIELDS * DIM),
    "over fields": lambda: Model(_stacked(_conv), 3 * FIELDS * DIM),
    "reversed": lambda: Model(_reversed, FIELDS * DIM),
    "side by side": lambda: Model(lambda self, vectors: self.top(torch.cat(vectors, 1)), FIELDS * DIM),
}


def compiled(model: nn.Module, module: Any, **more: Any) -> Any:
    return towerize(model, TWO, example_inputs=INPUTS, tower_module=module, init="preserve", **more)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def made(program: Any) -> TowerModel:
    found = program.tower_model
    assert found is not None
    return found


@pytest.mark.parametrize("module", [DLRMTower(0, 1, 16), [DLRMTower(0, 2, 8), DLRMTower(0, 3, 8)]])
@pytest.mark.parametrize("name", MODELS)
def test_exact_where_nothing_is_compressed(name: str, module: Any) -> None:
    model = built(MODELS[name])
    program = compiled(model, module).eval()
    if name == "over fields" and made(program).redrawn:
        # Its filters take neighbours, of which there are others, and the layer behind them is drawn again.
        assert made(program).redrawn == ("top.weight",)
        return
    torch.testing.assert_close(program(*INPUTS), model(*INPUTS), rtol=1e-4, atol=1e-4)
    assert not made(program).redrawn
    if name == "side by side":
        assert made(program).way == "re-sized"


@pytest.mark.parametrize("module", [DLRMTower(0, 3, 16), DLRMTower(0, 1, 16)])
def test_what_is_kept_is_tried_beside_what_is_drawn(module: DLRMTower) -> None:
    model = built(lambda: Model(_stacked(_weighted), DIM))
    program = compiled(model, module).eval()
    assert made(program).way == "expanded" and "a warm start does not carry over" in made(program).why
    torch.testing.assert_close(program(*INPUTS), model(*INPUTS), rtol=1e-4, atol=1e-4)


def test_a_tensor_that_counts_vectors_is_not_taken_for_kept_where_their_number_stays() -> None:
    """Three features and one, two vectors of each tower: four are four, but not the same."""

    def weigh(self: Any, e: torch.Tensor) -> torch.Tensor:
        return self.top((e * (self.each + torch.arange(4.0)).unsqueeze(1)).flatten(1))

    torch.manual_seed(0)
    model = built(lambda: Model(_stacked(weigh), FIELDS * DIM))
    nn.init.normal_(model.get_parameter("each"))
    towers = [["tables.0", "tables.1", "tables.2"], ["tables.3"]]
    program = compiled(model, DLRMTower(0, 2, 16), towers=towers).eval()
    assert made(program).way == "expanded" or "each" in made(program).redrawn


MIXED = [(8, 16, 8, 16), (8, 8, 16, 16)]
PLANS = [[["tables.0", "tables.1"], ["tables.2", "tables.3"]], [["tables.0", "tables.2"], ["tables.1", "tables.3"]]]


def _concat(widths: tuple[int, ...]) -> nn.Module:
    return built(lambda: Model(lambda self, vectors: self.top(torch.cat(vectors, 1)), sum(widths), widths))


@pytest.mark.parametrize("towers", PLANS)
@pytest.mark.parametrize(
    "module",
    [
        [DLRMTower(0, 2, 4), DLRMTower(0, 2, 12)],
        [DLRMTower(1, 0, 4), DLRMTower(1, 0, 6)],
        [DLRMTower(1, 0, 8), DLRMTower(1, 0, 12)],
        {0: DLRMTower(1, 0, 12)},
        {1: DLRMTower(0, 1, 20)},
    ],
)
def test_towers_that_make_other_widths(module: Any, towers: list[list[str]]) -> None:
    model = _concat((8, 8, 8, 8))
    program = compiled(model, module, towers=towers).eval()
    assert made(program).way == "re-sized", made(program).why
    if all(one.columns >= sum(one.widths) for one in made(program).vectors):
        torch.testing.assert_close(program(*INPUTS), model(*INPUTS), rtol=1e-4, atol=1e-4)
    else:
        assert float((program(*INPUTS) - model(*INPUTS)).abs().max()) < 10


@pytest.mark.parametrize("towers", PLANS)
@pytest.mark.parametrize("widths", MIXED)
@pytest.mark.parametrize("module", [PassThrough(), DLRMTower(0, 2, 16), CrossTower(16, 1, 3, per_feature=True)])
def test_tables_of_other_widths(module: Any, widths: tuple[int, ...], towers: list[list[str]]) -> None:
    model = _concat(widths)
    in_each = [{widths[int(name[-1])] for name in tower} for tower in towers]
    if isinstance(module, DLRMTower) and module.c and any(len(one) > 1 for one in in_each):
        with pytest.raises(PlanError, match="must then be equally wide"):
            compiled(model, module, towers=towers)
        return
    program = compiled(model, module, towers=towers).eval()
    assert made(program).way == "re-sized", made(program).why
    torch.testing.assert_close(program(*INPUTS), model(*INPUTS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite(value: float, expand: bool) -> None:
    model = built(MODELS["side by side"])
    with torch.no_grad():
        model.get_parameter("tables.0.weight")[0] = value
    for module in (DLRMTower(1, 0, 4), DLRMTower(0, 1, 4)):
        with pytest.raises(PlanError, match="NaN or infinite values"):
            compiled(model, module, expand=expand)
    same = compiled(model, DLRMTower(1, 0, 8), expand=expand).eval()
    finite = INPUTS[0][INPUTS[0][:, 0] != 0]
    torch.testing.assert_close(same(finite), model(finite), rtol=1e-4, atol=1e-4)
