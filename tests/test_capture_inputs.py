"""Inputs that stand in the way of dealing a batch over ranks: the refusal says which, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from models import line_of
from torch import nn
from torch.nn.utils import rnn

from dmt_compile import CaptureError, InputError, Topology, towerize

TOPOLOGY = Topology(2, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(10, 4), nn.Embedding(10, 4)

    def score(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user(user) * self.item(item)).sum(-1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.score(user, item)


def ids(batch: int = 12) -> torch.Tensor:
    return torch.randint(1, 10, (batch,))


# The number of samples as a plain number


@dataclass
class Batch:
    user: torch.Tensor
    item: torch.Tensor
    size: int


class InDict(Pair):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        return self.score(batch["user"], batch["item"]).view(batch["size"], -1)


class InRecord(Pair):
    def forward(self, batch: Batch) -> torch.Tensor:  # type: ignore[override]
        return self.score(batch.user, batch.item).view(batch.size, -1)


class ByKeyword(Pair):
    def forward(self, user: torch.Tensor, item: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.score(user, item).view(more["size"], -1)


@pytest.mark.parametrize(
    "kind, given, place",
    [
        (InDict, lambda: ({"user": ids(), "item": ids(), "size": 12, "epoch": 3},), r"batch\['size'\]"),
        (InRecord, lambda: (Batch(ids(), ids(), 12),), r"batch\.size"),
        (ByKeyword, lambda: {"user": ids(), "item": ids(), "size": 12}, "size"),
    ],
)
def test_number_of_samples_as_a_plain_number(kind: type[Pair], given: Any, place: str) -> None:
    says = rf"first 6 of the 12 samples(.|\n)*\n{place} is a plain number, 12 as is the number of samples(.|\n)*\(x\.shape\[0\]\)$"
    with pytest.raises(CaptureError, match=says):
        towerize(kind(), TOPOLOGY, example_inputs=given())


# A batch of which the model does not run on every part


class Longest(Pair):
    """Attends to sequences that are padded to the longest of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, past: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        lengths = (past != 0).sum(1)
        packed = rnn.pack_padded_sequence(self.user(past), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return (padded * (past != 0).unsqueeze(2)).sum(1) * self.item(item)


def test_part_of_a_batch_that_the_model_does_not_run_on() -> None:
    past, item = torch.randint(1, 10, (13, 6)), ids(13)
    program = towerize(Longest(), TOPOLOGY, example_inputs=(past, item))
    past[4:7, 4:] = 0
    with pytest.raises(InputError) as caught:
        program.verify(past, item)
    first, second, third, last = str(caught.value).split("\n")
    assert first == "the flat model does not run on what rank 1 gets of this batch of 13, samples 4 to 6."
    assert second.startswith(f"  {__file__}:{line_of(Longest.forward, 'padded *')}: `") and "The size of tensor a (4)" in second
    assert third.startswith(f"{__file__}:{line_of(Longest.forward, 'pad_packed_sequence')}: `") and third.endswith("total_length=")
    assert last.endswith("let forward take any part of a batch, as every rank gets one.")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_single_sample_that_the_model_does_not_run_on() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if int(x.shape[0]) == 1:
                raise ValueError("no statistics of one sample")
            return x - x.mean(0)

    class Centred(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.centre = Picky()

        def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
            return self.score(user, item) + self.centre(self.user(user)).sum(1)

    program = towerize(Centred(), TOPOLOGY, example_inputs=(ids(), ids()))
    with pytest.raises(InputError, match=r"rank 1 gets of this batch of 5, sample 2\.\n.*no statistics of one sample\n"):
        program.verify(ids(5), ids(5))


# numpy's arrays


class FromArrays(Pair):
    def forward(self, user: Any, item: Any, **more: Any) -> torch.Tensor:
        return self.score(torch.LongTensor(user), torch.LongTensor(item))


def test_arrays_are_no_inputs() -> None:
    first, second = np.arange(8), np.arange(8)
    with pytest.raises(CaptureError, match=r"arrays of numpy.*: user \(8,\) of int64, item \(8,\) of int64\. Give tensors"):
        towerize(FromArrays(), TOPOLOGY, example_inputs=(first, second))
    with pytest.raises(CaptureError, match=r": there\[1\] \(8,\) of float32\."):
        given = {"user": ids(), "item": ids(), "there": [3, np.ones(8, dtype=np.float32)]}
        towerize(FromArrays(), TOPOLOGY, example_inputs=given)
    assert towerize(Pair(), TOPOLOGY, example_inputs=(torch.as_tensor(first), torch.as_tensor(second))).lookups.lookups
