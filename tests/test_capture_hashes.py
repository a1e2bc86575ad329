"""Traced values as keys: what a dict or a set holds for a number is never taken for what it holds for none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import line_of
from torch import nn

from dmt_compile import CaptureError, InputError, Topology, towerize

TOPOLOGY = Topology(2, 2)
ROWS = 20
SCALES = {5: 0.5, 16: 0.25}
Batch = tuple[torch.Tensor, torch.Tensor]


def batch(samples: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randint(0, ROWS, shape, generator=generator) for shape in ((samples, length), (samples,)))  # type: ignore[return-value]


class Scaled(nn.Module):
    """A history (B, n) and an item; what is looked up is scaled by a number that the sizes decide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.item = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
        self.special = {self.table.weight}

    def scale(self, history: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.table(history).tanh().sum(1) * self.scale(history) * self.item(item)


class ByLengthInDict(Scaled):
    def scale(self, history: torch.Tensor) -> Any:
        return SCALES.get(history.shape[1], 1.0)


class ByLengthInSet(Scaled):
    def scale(self, history: torch.Tensor) -> Any:
        return 2.0 if history.size(1) in {5, 16} else 1.0


class ByPair(Scaled):
    """Part of a key."""

    def scale(self, history: torch.Tensor) -> Any:
        return {(5, 2): 3.0}.get((history.shape[1], history.dim()), 1.0)


class ByParameter(Scaled):
    """Tensors are found by identity."""

    def scale(self, history: torch.Tensor) -> Any:
        return 2.0 if self.table.weight in self.special else 1.0


@functools.lru_cache
def remembered(length: int) -> float:
    return SCALES.get(length, 1.0)


class ByRememberedNumber(Scaled):
    def scale(self, history: torch.Tensor) -> Any:
        return remembered(history.shape[1])


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length)


class ByRememberedTensor(Scaled):
    def scale(self, history: torch.Tensor) -> Any:
        return positions(history.shape[1]).sum()


class BySamplesInSet(Scaled):
    def scale(self, history: torch.Tensor) -> Any:
        return 2.0 if len(history) in {6, 8} else 1.0


class BySamplesInDict(Scaled):
    def scale(self, history: torch.Tensor) -> Any:
        return SCALES.get(history.shape[0], 1.0)


class Part(nn.Module):
    """Holds no lookup, and may be kept whole."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(1) * SCALES.get(rows.shape[1], 1.0)


class InPart(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.part(self.table(history)) * self.item(item)


@pytest.mark.parametrize("kind", [ByLengthInDict, ByLengthInSet, ByPair, ByRememberedNumber, ByRememberedTensor])
def test_what_is_found_for_a_length_is_kept_for_that_length_only(kind: type[Scaled]) -> None:
    model = kind().eval()
    program = towerize(model, TOPOLOGY, example_inputs=batch(7, 5)).eval()
    for samples in (1, 9):
        given = batch(samples, 5)
        torch.testing.assert_close(program(*given), model(*given), rtol=0, atol=0)
    with pytest.raises(InputError, match=r"'history' is of shape \(9, 16\)"):
        program(*batch(9, 16))


@pytest.mark.parametrize("kind", [BySamplesInSet, BySamplesInDict, ByParameter])
def test_what_no_graph_can_look_up_is_refused(kind: type[Scaled]) -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(kind(), TOPOLOGY, example_inputs=batch(7, 5))
    place = f"{__file__}:{line_of(kind, 'return')}"
    assert place in str(caught.value)
    assert "looks up a traced value in a dict or a set" in str(caught.value)


def test_a_part_that_looks_up_a_size_is_kept_whole() -> None:
    model = InPart()
    program = towerize(model, TOPOLOGY, example_inputs=batch(7, 5))
    assert "looks up a traced value in a dict or a set" in program.leaves["part"]
    for length in (5, 16, 3):
        given = batch(6, length)
        torch.testing.assert_close(program(*given), model(*given), rtol=0, atol=0)
