"""The shapes that the graphs of all stages record, and their check at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_models import CASES
from torch import nn

from dmt_compile import Topology, TowerProgram, towerize
from dmt_compile.shapes import SHAPE, PerSample, agrees, fit, text


def program(name: str) -> TowerProgram:
    return towerize(CASES[name].build(), Topology(2, 2), example_inputs=CASES[name].example())


def check(compiled: TowerProgram, name: str, batch: int = 9) -> Any:
    args, kwargs = CASES[name].batch(batch, seed=1)
    (found,) = [one for one in compiled.verify(*args, **kwargs, steps=0).checks if one.name == "recorded shapes"]
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_tensor_of_the_model_has_one_in_every_stage(name: str) -> None:
    compiled = program(name)
    flat = {node.name for node in compiled.stages["flat"].graph.nodes if SHAPE in node.meta}
    outputs = compiled.lookups.outputs
    calls = {output.node for output in outputs} | {name for output in outputs for name in output.inner}
    weights = {node.name for node in compiled.stages["flat"].graph.nodes if node.op == "get_attr"}
    for stage in ("towers", "classic", "sptt", "lowered"):
        kept = {node.name for node in compiled.stages[stage].graph.nodes if SHAPE in node.meta}
        made = [node for node in compiled.stages[stage].graph.nodes if SHAPE in node.meta and node.name not in flat]
        assert flat - calls - weights <= kept
        assert len(made) == len(outputs)
    found = check(compiled, name)
    assert found.passed, found.found
    assert found.found.split()[0] != "0"


def test_sizes_that_the_data_decides_are_left_open() -> None:
    compiled = program("ragged")
    shapes = {node.name: node.meta[SHAPE] for node in compiled.stages["flat"].graph.nodes if SHAPE in node.meta}
    assert text(shapes["user"]) == "(B,)"
    assert text(shapes["history"]) == "(B, 4)"
    assert any(None in shape for shape in shapes.values())
    assert check(compiled, "ragged").passed


def test_a_wrong_shape_is_found() -> None:
    """A stage whose value has another shape than the flat model's, and the node it is in."""
    compiled = program("nested")
    stage = compiled.stages["sptt"]
    made = next(node for node in stage.graph.nodes if node.name.startswith("output_") and SHAPE in node.meta)
    module = stage.module(made)
    forward = module.forward
    module.forward = lambda *args: forward(*args).unsqueeze(0)  # type: ignore[method-assign]
    found = check(compiled, "nested")
    assert not found.passed
    assert made.name in found.found


class Grows(nn.Module):
    """Sizes that are multiples of the batch, and some more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.table(x)
        return rows.reshape(-1, 1), torch.cat([rows.sum(1), torch.ones(3, 2)])


def test_sizes_grow_with_the_batch() -> None:
    x = torch.arange(21).view(7, 3) % 9
    compiled = towerize(Grows(), Topology(2, 2), example_inputs=(x,))
    shapes = {text(node.meta[SHAPE]) for node in compiled.stages["lowered"].graph.nodes if SHAPE in node.meta}
    assert {"(B, 3)", "(B, 3, 2)", "(6*B, 1)", "(B+3, 2)"} <= shapes
    assert compiled.verify(x[:5]).passed


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=4, unique=True),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),
    st.integers(0, 99),
)
def test_fit(batches: list[int], sizes: list[tuple[int, int]], batch: int) -> None:
    """Every size that is a multiple of the batch and a constant is found from two batches."""
    seen = [(one, [times * one + plus for times, plus in sizes]) for one in batches]
    shape = fit(seen)
    assert shape is not None
    assert all(agrees(shape, found, one) for one, found in seen)
    assert [size.at(batch) if isinstance(size, PerSample) else size for size in shape] == [t * batch + p for t, p in sizes]


def test_fit_without_a_rule() -> None:
    assert fit([(4, (2, 3)), (2, (2,))]) is None
    assert fit([(4, (5, 3)), (2, (2, 3))]) == (None, 3)
    assert fit([(4, (8,)), (2, (4,)), (2, (5,))]) == (None,)
    assert fit([(4, (8,)), (4, (7,))]) == (None,)
