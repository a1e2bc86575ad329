"""Forward that changes the lists and dicts that it is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmt_compile import CaptureError, Topology, towerize

TOPOLOGY = Topology(1, 2)


class Given(nn.Module):
    """Changes a list or dict that it is given."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.past, self.item, self.change = nn.Embedding(30, 4), nn.Embedding(30, 4), change

    def forward(self, batch: Any) -> torch.Tensor:
        past, item = self.change(batch)
        return self.past(past).sum(1) + self.item(item)


def _entry(batch: Any) -> Any:
    batch[0] = (batch[0] + 1) % 30
    return batch


def _appended(batch: Any) -> Any:
    batch.append((batch[0] + 1) % 30)
    return batch[-1], batch[1]


def _nested(batch: Any) -> Any:
    batch["ids"][0] = batch["ids"][0].flip(1)
    return batch["ids"]


def _popped(batch: Any) -> Any:
    return batch.pop("past"), batch["item"]


def _added(batch: Any) -> Any:
    batch["more"] = (batch["past"] + 1) % 30
    return batch["more"], batch["item"]


@pytest.mark.parametrize("change", [_entry, _appended, _nested, _popped, _added])
def test_containers_that_forward_changes(change: Callable[[Any], Any]) -> None:
    past, item = torch.randint(0, 30, (6, 5)), torch.randint(0, 30, (6,))
    ids = [past, item]
    given = {_nested: {"ids": ids}, _popped: {"past": past, "item": item}, _added: {"past": past, "item": item}}.get(change, ids)
    with pytest.raises(CaptureError, match=rf"{re.escape(__file__)}:\d+: forward changes its inputs in place"):
        towerize(Given(change), TOPOLOGY, example_inputs=(given,))
    assert len(ids) == 2 and ids[0] is past and ids[1] is item
    assert given is ids or list(given) in (["ids"], ["past", "item"])


def test_containers_that_forward_changes_in_training_only() -> None:
    class Adds(Given):
        def forward(self, batch: Any) -> torch.Tensor:
            if self.training:
                batch["past"] = (batch["past"] + 1) % 30
            return super().forward(batch)

    given = {"past": torch.randint(0, 30, (6, 5)), "item": torch.randint(0, 30, (6,))}
    before = dict(given)
    towerize(Adds(lambda batch: (batch["past"], batch["item"])), TOPOLOGY, example_inputs=(given,))
    assert list(given) == list(before) and all(given[key] is value for key, value in before.items())
