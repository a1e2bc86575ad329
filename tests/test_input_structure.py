"""Batches that are built in another way than the example inputs: refused by name, whatever runs them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dmt_compile import InputError, Topology, TowerProgram, towerize
from dmt_compile.verify.compare import bits_differ

ROWS = 9


class Two(nn.Module):
    """Two tables, read with what ``read`` finds in forward's first argument; an argument that may be left away beside it."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(ROWS, 2), nn.Embedding(ROWS, 2)
        self.read = read

    def forward(self, batch: Any, label: Any = None) -> torch.Tensor:
        a, b = self.read(batch)
        return self.a(a) + self.b(b)


def ids(batch: int = 4, *shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (batch, *shape), generator=torch.Generator().manual_seed(batch))


def keys(batch: Any) -> Any:
    return batch["a"], batch["b"]


def places(batch: Any) -> Any:
    return batch[0], batch[1]


def unpacked(batch: Any) -> Any:
    a, b = batch
    return a, b


def nested(batch: Any) -> Any:
    return batch["ids"]["a"], batch["ids"]["b"][-1]


def columns(batch: Any) -> Any:
    return batch[:, 0], batch[:, 1]


EXAMPLES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "keys": (keys, {"a": ids(), "b": ids()}),
    "whole numbers": (places, {0: ids(), 1: ids()}),
    "places": (places, [ids(), ids()]),
    "unpacked": (unpacked, (ids(), ids())),
    "nested": (nested, {"ids": {"a": ids(), "b": [ids(), ids()]}}),
    "columns": (columns, ids(4, 2)),
}


def program(name: str) -> TowerProgram:
    read, example = EXAMPLES[name]
    return towerize(Two(read), Topology(1, 2), example_inputs=(example, torch.ones(4)))


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [
        ("keys", {"a": ids(6)}, "the batch has no batch['b'], which the model reads; there are 'a'"),
        ("keys", ids(6), "batch is a tensor of shape (6,), in example_inputs it is a dict with 'a', 'b'"),
        ("keys", [ids(6), ids(6)], "batch is a list of 2, in example_inputs it is a dict with 'a', 'b'"),
        ("keys", None, "batch is None, in example_inputs it is a dict"),
        ("keys", {"a": ids(6), "b": [ids(6)]}, "batch['b'] is a list of 1, in example_inputs it is a tensor of shape (4,)"),
        ("whole numbers", [ids(6), ids(6)], "batch is a list of 2, in example_inputs it is a dict with 0, 1"),
        (
            "places",
            [ids(6)],
            "the batch has no batch[1], which the model reads: batch is a list of 1; in example_inputs, batch[1] is",
        ),
        ("places", {"a": ids(6)}, "batch is a dict with 'a', in example_inputs it is a list of 2"),
        ("places", {0: ids(6), 1: ids(6)}, "batch is a dict with 0, 1, in example_inputs it is a list of 2"),
        ("unpacked", (ids(6),), "the batch has no batch[1], which the model reads: batch is a tuple of 1"),
        ("nested", {"ids": ids(6)}, "batch['ids'] is a tensor of shape (6,), in example_inputs it is a dict with 'a', 'b'"),
        (
            "nested",
            {"ids": {"a": ids(6), "b": []}},
            "the batch has no batch['ids']['b'][-1], which the model reads: batch['ids']['b'] is",
        ),
        (
            "nested",
            {"ids": {"a": ids(6), "b": {"c": ids(6)}}},
            "batch['ids']['b'] is a dict with 'c', in example_inputs it is a list of 2",
        ),
        ("columns", {"a": ids(6)}, "batch is a dict with 'a', in example_inputs it is a tensor of shape (4, 2)"),
        ("columns", [ids(6, 2)], "batch is a list of 1, in example_inputs it is a tensor of shape (4, 2)"),
    ],
)
def test_another_structure(name: str, batch: Any, message: str) -> None:
    compiled = program(name)
    for run in (compiled, compiled.verify, compiled.simulate):
        with pytest.raises(InputError) as caught:
            run(batch)
        assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.parametrize("label", [{}, {"label": None}, {"label": torch.ones(6)}, {"label": ["any", 1]}])
def test_what_the_model_does_not_read_may_be_anything(name: str, label: dict[str, Any]) -> None:
    batches = {
        "keys": {"b": ids(6), "c": 1, "a": ids(6)},
        "whole numbers": {0: ids(6), 1: ids(6), 2: "x"},
        "places": (ids(6), ids(6), 7),
        "unpacked": [ids(6), ids(6)],
        "nested": {"ids": {"a": ids(6), "b": (ids(6),)}, "more": None},
        "columns": ids(6, 3),
    }
    compiled = program(name)
    found = compiled(batches[name], **label)
    assert bits_differ(found, compiled.stages["flat"].root(batches[name], **label)) is None


def test_arguments_with_stars() -> None:
    class Stars(Two):
        def forward(self, *columns: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            return self.a(columns[0]) + self.b(columns[1]) + more["scale"].unsqueeze(1)

    model = Stars(keys)
    compiled = towerize(model, Topology(1, 2), example_inputs=(ids(), ids()), example_kwargs={"scale": torch.ones(4)})
    batch = (ids(6), ids(6))
    assert compiled.verify(*batch, scale=torch.ones(6)).passed
    for run in (compiled, compiled.simulate):
        with pytest.raises(InputError, match=r"the batch has no \*columns\[1\], which the model reads: \*columns is a tuple of 1"):
            run(ids(6), scale=torch.ones(6))
        with pytest.raises(InputError, match=r"the batch has no \*\*more\['scale'\], which the model reads"):
            run(*batch)


def test_what_acts_as_a_dict_or_a_list_is_taken() -> None:
    compiled = program("keys")
    batch = {"a": ids(6), "b": ids(6)}
    assert bits_differ(compiled(UserDict(batch)), compiled(batch)) is None

    class Record:
        def __getitem__(self, key: str) -> torch.Tensor:
            return batch[key]

    assert bits_differ(compiled(Record()), compiled(batch)) is None
    in_list = program("places")
    assert bits_differ(in_list(torch.stack([ids(6), ids(6)])), in_list([ids(6), ids(6)])) is None
