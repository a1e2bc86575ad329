"""Tolerances of gradients that flow through several floating types."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmt_compile import Topology, towerize
from dmt_compile.verify.compare import furthest, furthest_change
from dmt_compile.verify.deal import batch_size, deal
from dmt_compile.verify.equivalence import Verifier

LONG, USUAL, SHORT = torch.float64, torch.float32, torch.bfloat16
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]


class Mixed(nn.Module):
    """Table a with a layer, table b cast to another type on its way, and the type of the output."""

    def __init__(self, a: torch.dtype, b: torch.dtype, cast: torch.dtype, out: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cast, self.result = cast, out
        self.a = nn.EmbeddingBag(50, 4, mode="sum", dtype=a)
        self.b = nn.EmbeddingBag(50, 6, mode="sum", dtype=b)
        self.layer = nn.Linear(4, 1, dtype=a)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(len(x), dtype=self.result)
        whole[:] = self.layer(self.a(x).tanh()).sum(1).to(self.result)
        return whole + self.b(y).to(self.cast).tanh().sum(1).to(self.result)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, 50, (6, 4), generator=g) for _ in range(2))
    return first, second


@pytest.mark.parametrize(
    ("types", "of_a", "of_b"),
    [
        ((LONG, LONG, LONG, LONG), LONG, LONG),
        ((USUAL, LONG, LONG, USUAL), USUAL, USUAL),
        ((LONG, LONG, USUAL, LONG), LONG, USUAL),
        ((LONG, USUAL, LONG, LONG), LONG, USUAL),
        ((USUAL, SHORT, USUAL, USUAL), USUAL, SHORT),
        ((USUAL, USUAL, SHORT, USUAL), USUAL, SHORT),
        ((LONG, LONG, LONG, USUAL), USUAL, USUAL),
    ],
)
def test_the_coarsest_type_on_the_way(types: Types, of_a: torch.dtype, of_b: torch.dtype) -> None:
    """On three ranks, whose number divides no power of two, the gradient's rounding differs; only those types' tolerance grows."""
    program = towerize(Mixed(*types), Topology(1, 3), example_inputs=batch())
    certificate = program.verify(*batch(), steps=2)
    assert certificate.passed, str(certificate)
    layout = program._dmt.analysis.layout
    inputs = deal(batch(), {}, 3, layout)
    verifier = Verifier(program.stages, inputs, [batch_size(*own, layout) for own in inputs], 0)
    assert verifier._types == {"a.weight": of_a, "layer.weight": of_a, "layer.bias": of_a, "b.weight": of_b}


def test_a_model_of_one_type_is_compared_in_it() -> None:
    right = {"w": torch.ones(4, dtype=LONG)}
    off, start = {"w": right["w"] * (1 + 1e-9)}, {"w": torch.zeros(4, dtype=LONG)}
    for types, passes in (({"w": LONG}, False), (None, False), ({"w": USUAL}, True)):
        assert (furthest(off, right, types=types)[0] <= 1) == passes
        assert (furthest_change(off, right, start, types=types)[0] <= 1) == passes
    assert furthest({"w": right["w"] * 1.001}, right, types={"w": USUAL})[0] > 1
