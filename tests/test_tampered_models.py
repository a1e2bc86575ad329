"""Models whose lookups were changed after they were made, and batches that TorchRec reads in a way of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import models
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from dmt_compile import CaptureError, InputError, Topology, towerize
from dmt_compile.verify.deal import deal

GRID = Topology(2, 2)


def _own_forward(model: models.Net) -> None:
    def doubled(self: Any, features: KeyedJaggedTensor) -> Any:
        return type(self).forward(self, features)

    model.ebc.forward = MethodType(doubled, model.ebc)


def _hook_on_collection(model: models.Net) -> None:
    model.ebc.register_forward_hook(lambda *_: None)


def _hook_on_bag(model: models.Net) -> None:
    next(iter(model.ebc.embedding_bags.values())).register_forward_pre_hook(lambda *_: None)


def _hook_on_model(model: models.Net) -> None:
    model.register_forward_hook(lambda *_: None)


def _other_pooling(model: models.Net) -> None:
    next(iter(model.ebc.embedding_bags.values())).mode = "max"


class _Bag(nn.EmbeddingBag):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * 2


def _other_bag(model: models.Net) -> None:
    name, bag = next(iter(model.ebc.embedding_bags.items()))
    model.ebc.embedding_bags[name] = _Bag(bag.num_embeddings, bag.embedding_dim, mode=bag.mode, include_last_offset=True)


def _computed_table(model: models.Net) -> None:
    nn.utils.parametrizations.weight_norm(next(iter(model.ebc.embedding_bags.values())))


@pytest.mark.parametrize(
    "tamper, reason",
    [
        (_own_forward, "forward of the EmbeddingBagCollection 'ebc' was replaced"),
        (_hook_on_collection, "'ebc' has hooks"),
        (_hook_on_bag, r"'ebc\.embedding_bags\..*' has hooks"),
        (_hook_on_model, "Net has hooks"),
        (_other_pooling, "pools by max"),
        (_other_bag, "is a _Bag with a forward of its own"),
        (_computed_table, "is parametrized"),
    ],
)
def test_what_towers_would_not_run_is_refused(tamper: Callable[[models.Net], None], reason: str) -> None:
    model = models.Net()
    tamper(model)
    with pytest.raises(CaptureError, match=reason):
        towerize(model, GRID)


def test_of_two_features_with_one_name_the_last_is_read() -> None:
    model = models.PooledOnly(models.table("a", ["x"], 4), models.table("b", ["y"], 4))
    program = towerize(model, GRID)
    batch = KeyedJaggedTensor(
        keys=["x", "y", "x"], values=torch.arange(12) % models.ROWS, lengths=torch.ones(12, dtype=torch.int32)
    )
    assert torch.equal(program(batch), model(batch))
    for found, (args, _) in zip(program.simulate(batch), deal((batch,), {}, 4), strict=True):
        assert torch.equal(found, model(*args))


def test_lookups_whose_names_collide_are_told_apart() -> None:
    model = models.PooledOnly(models.table("a", ["f"], 4), models.table("b", ["f"], 4), models.table("c", ["f@a"], 4))
    program = towerize(model, GRID)
    assert len({lookup.name for lookup in program.lookups.lookups}) == 3
    assert program.verify(models.jagged(("f", "f@a"), 5)).passed


@pytest.mark.parametrize(
    "values, lengths, reason",
    [
        (torch.rand(4), [1, 1, 1, 1], "must hold integer ids"),
        (torch.zeros(4, dtype=torch.long), [2, 2, 1, -1], "negative lengths"),
    ],
)
def test_ids_that_are_none(values: torch.Tensor, lengths: list[int], reason: str) -> None:
    program = towerize(models.PooledOnly(models.table("a", ["x"], 4)), Topology(1, 1))
    batch = KeyedJaggedTensor(keys=["x"], values=values, lengths=torch.tensor(lengths))
    with pytest.raises(InputError, match=reason):
        program.stages["towers"].graph_module(batch)


def test_ids_beyond_the_travelling_type_are_not_folded_into_the_table() -> None:
    program = towerize(models.PooledOnly(models.table("a", ["x"], 4)), Topology(1, 1))
    batch = KeyedJaggedTensor(keys=["x"], values=torch.tensor([2**32 + 1]), lengths=torch.tensor([1]))
    with pytest.raises(InputError, match="has id 4294967297, outside its table"):
        program.simulate(batch)


def test_a_subclass_with_the_shipped_forward_is_a_lookup() -> None:
    class Mine(EmbeddingBagCollection):
        pass

    model = models.Net()
    model.ebc = Mine(tables=model.ebc.embedding_bag_configs())
    assert towerize(model, GRID).verify(*models.inputs()).passed


def test_a_scripted_layer_is_refused() -> None:
    model = models.Net()
    model.bottom = torch.jit.script(model.bottom)
    with pytest.raises(CaptureError, match=r"'bottom\..*' .* does not share its parameters"):
        towerize(model, GRID)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = models.Net()
    model.stream = open(__file__)  # noqa: SIM115
    with pytest.raises(CaptureError, match="cannot be copied around their parameters"):
        towerize(model, GRID)
    model.stream.close()


class _Scaled(models.PooledOnly):
    """Reads state of its own in the way that ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__(models.table("a", ["x"], 4), models.table("b", ["y"], 4))
        self.how = how
        self.bottom = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.tensor([1, 2, 3]))

    def forward(self, sparse: KeyedJaggedTensor) -> Any:
        out = super().forward(sparse)
        if self.how == "branch on a counter":
            return out * 2 if self.calls > 3 else out
        if self.how == "parameter found by iterating":
            return out * next(iter(self.bottom.parameters())).detach().abs().mean()
        if self.how == "item of a parameter":
            return out * next(iter(self.bottom.parameters())).sum().item()
        if self.how == "random numbers":
            return out + torch.rand(1)
        if self.how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return out @ out.t()
        if self.how == "float buffer after a fallback":
            return sum((out * int(row) for row in self.table), start=out * 0) * (self.scale * 2)
        for row in self.table:
            out = out * int(row)
        return out * (self.scale * 2)


@pytest.mark.parametrize(
    "how",
    [
        "branch on a counter",
        "parameter found by iterating",
        "item of a parameter",
        "random numbers",
        "autocast",
        "float buffer after a fallback",
    ],
)
def test_what_a_graph_would_freeze_is_refused(how: str) -> None:
    with pytest.raises(CaptureError, match=rf"{__file__}:\d+"):
        towerize(_Scaled(how), GRID)


def test_integer_tables_may_be_looked_at() -> None:
    class Tabled(models.PooledOnly):
        def __init__(self) -> None:
            super().__init__(models.table("a", ["x"], 4), models.table("b", ["y"], 4))
            self.register_buffer("table", torch.tensor([1, 2, 3]))

        def forward(self, sparse: KeyedJaggedTensor) -> Any:
            out = super().forward(sparse)
            for row in self.table:
                out = out * int(row)
            return out

    assert towerize(Tabled(), GRID).verify(models.jagged(("x", "y"), 6)).passed


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"model\._orig_mod"):
        towerize(torch.compile(models.Net(), backend="eager"), GRID)


def test_a_plain_embedding_with_a_replaced_forward_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3), nn.Softmax(dim=1))
    other = nn.Embedding(10, 4)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model, other

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.first(ids) @ self.second(ids).sum(dim=1)[:, :3].t()

    def doubled(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight) * 2

    model[0].forward = MethodType(doubled, model[0])
    given = torch.randint(0, 10, (6, 2))
    whole = Two()
    program = towerize(whole, GRID, example_inputs=(given,))
    assert "forward was replaced" in program.replicated["first.0.weight"]
    assert torch.equal(program(given), whole(given))
    assert program.verify(given).passed
