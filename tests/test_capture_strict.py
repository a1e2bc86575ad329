"""Models that only torch.export(strict=True) takes, what no way to capture takes, and sizes that an example does not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_models import Result
from models import collection, jagged, line_of, table
from test_capture_export import NARROW, WIDE, Base, Counts, Diverts, build, pair, proved
from torch import nn
from torchrec import KeyedJaggedTensor

from dmt_compile import CaptureError, towerize
from dmt_compile.capture.attempts import _capture_exported
from dmt_compile.errors import source_location


def _plain(value: Any) -> Any:
    return [value.logits] if isinstance(value, Result) else value


class Positions(Base):
    """Positions that numpy makes of both sizes; a loss in training; a layer of every kind that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(4, 4, batch_first=True), nn.LayerNorm(4)
        self.bag = nn.EmbeddingBag(10, 4, max_norm=1.0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        batch, count = x.shape
        places = torch.LongTensor(np.tile(np.arange(count), [batch, 1]))
        rows = F.dropout(self.norm(self.a(x)) + self.b(places), 0.3, self.training)
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        last = self.gru(mixed)[1][0]
        score = self.out(last + self.bag(x))
        return {"score": score, "parts": [score.mean()] if self.training else [last]}


class AsArrays(Base):
    """numpy on ids, on the way to a lookup."""

    def forward(self, x: torch.Tensor) -> Result:
        ids = x.numpy()
        known = torch.from_numpy((ids % 10).astype(np.int64))
        return Result(self.out(self.a(known).sum(1) + self.b(x).sum(1)), None)


class Functions(Base):
    """Bags by a function of torch, which is no module that could stay whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.LongTensor(np.tile(np.arange(x.shape[1]), [x.shape[0], 1]))
        return self.out(F.embedding_bag(x, self.a.weight, mode="sum") + self.b(places).sum(1))


def several(batch: int) -> tuple[torch.Tensor]:
    return (torch.arange(batch * 3).reshape(batch, 3) % 7 % 5,)


@pytest.mark.parametrize("kind", [Positions, AsArrays, Functions])
def test_only_strict_export(kind: type[Base]) -> None:
    model = build(kind)
    with pytest.raises(CaptureError, match="could not be exported"):
        _capture_exported(model, several(9), {}, strict=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = towerize(model, WIDE, example_inputs=several(9))
    assert program._dmt.captured.front_end == "torch.export"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "also rows under max_norm"
    for training in (True, False):
        proved(program.train(training), *several(20))
        proved(program, *several(4))
        model.train(training)
        torch.manual_seed(1)
        expected = model(*several(7))
        torch.manual_seed(1)
        torch.testing.assert_close(_plain(program(*several(7))), _plain(expected), rtol=0, atol=0)


def test_layers_stay_whole_for_dynamo() -> None:
    program = towerize(build(Positions), NARROW, example_inputs=several(9))
    called = {str(node.target) for node in program.stages["flat"].graph.nodes if node.op == "call_module"}
    assert {"a", "b", "gru", "norm", "bag", "attention", "out"} <= called
    calls = {output.node for output in program.lookups.outputs}
    for node in program.stages["flat"].graph.nodes:
        if node.name in calls:
            assert (source_location(node) or "").startswith(f"{__file__}:"), node.format_node()


def test_number_that_the_data_gives() -> None:
    """Running forward makes no size of a value; reading it does."""
    program = towerize(build(Counts), NARROW, example_inputs=pair())
    proved(program, *pair(20))


class Halves(nn.Module):
    """Takes another way for some sizes that no first sample shows, or for more samples than the example has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.out, self.kind = nn.Embedding(10, 4), nn.Linear(4, 1), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.a(x).sum(1)
        if self.kind == "rest" and len(x) % 4 == 3:
            return rows
        if self.kind == "many" and x.shape[0] > 100:
            return rows
        return self.out(rows)


@pytest.mark.parametrize("kind, why", [("rest", "takes another way for 7 samples"), ("many", "not of 2 to 100 samples")])
def test_sizes_that_the_example_does_not_show(kind: str, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        towerize(Halves(kind), NARROW, example_inputs=several(9))


class Neither(Positions):
    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        if found["score"].sum() > 3:
            return found["score"]
        return found


def test_refused_by_all_in_few_words() -> None:
    """Of the two ways to export, the second is told only where it stops at another line."""
    with pytest.raises(CaptureError) as caught:
        towerize(build(Neither), NARROW, example_inputs=several(9))
    text = str(caught.value)
    first, second = line_of(Positions.forward, "np.tile"), line_of(Neither.forward, ".sum() > 3")
    assert text.count("could not be") == 2 and text.count("\n") <= 7, text
    assert f"{__file__}:{first}: `" in text
    assert text.count(f"{__file__}:{second}: `") == 1
    with pytest.raises(CaptureError) as caught:
        towerize(Diverts(), NARROW, example_inputs=pair())
    assert "strict" not in str(caught.value) and str(caught.value).count("\n") == 4


class Sessions(Positions):
    """Dynamo follows numpy up to a size that depends on ids; of that it tells the line in words only."""

    def forward(self, x: torch.Tensor) -> Any:
        seen = [np.unique(row) for row in x.cpu().numpy()]
        found = super().forward(x)
        padded = [one.tolist() + [0] * (9 - len(one)) for one in seen]
        return found["score"] + torch.LongTensor(padded).sum()


def test_line_of_a_size_that_depends_on_values() -> None:
    with pytest.raises(CaptureError) as caught:
        towerize(build(Sessions), NARROW, example_inputs=several(9))
    last = str(caught.value).split("\n")[-1]
    assert last.startswith(f"  {__file__}:{line_of(Sessions.forward, 'one.tolist()')}: `"), caught.value
    assert "depends on the values of tensors" in last


def test_many_models_in_one_process() -> None:
    """Dynamo keeps what it has compiled, and gives up after a few versions of one function; each model here is a new one."""
    for width in range(1, 10):
        model = build(AsArrays)
        model.out = nn.Linear(4, width)
        assert towerize(model, NARROW, example_inputs=several(6))(*several(5)).logits.shape == (5, width)


def test_collection_that_is_called_with_other_keys() -> None:
    """Dynamo knows one form of the calls of a module: what is called in two is not taken for something else."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.out = collection(table("t", ["f0"])), nn.Linear(16, 1)

        def forward(self, x: torch.Tensor, first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> torch.Tensor:
            places = torch.LongTensor(np.tile(np.arange(x.shape[1]), [x.shape[0], 1]))
            rows = torch.cat([self.bags(first).values(), self.bags(second).values()], 1)
            return self.out(rows) + (places * x).sum(1, keepdim=True)

    def given(*keys: str) -> tuple[Any, ...]:
        return torch.rand(9, 3), jagged(["f0", "f1"], 9), jagged(keys, 9)

    with pytest.raises(CaptureError, match="could not be exported") as caught:
        towerize(Twice(), NARROW, example_inputs=given("f0"))
    assert f"{__file__}:{line_of(Twice.forward, 'self.bags(first)')}: `" in str(caught.value)
    proved(towerize(Twice(), NARROW, example_inputs=given("f0", "f1")), *given("f0", "f1"))
