"""Random models, plans and batches: the compiled program of every rank against the flat model, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import BatchSpec, ModelSpec, PooledOnly, SpecModel, TableSpec, jagged, run_ranks, table
from torch import nn

from dmt_compile import InputError, Topology, TowerProgram, towerize
from dmt_compile.adapters.torchrec import accept_empty_batches
from dmt_compile.runtime.tables import RankLookups
from dmt_compile.topology import valid_tower_counts
from dmt_compile.verify.compare import bits_differ, furthest, furthest_change

SETTINGS = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STAGES = ("towers", "classic", "sptt", "lowered")
SHAPES = [(4, 2), (2, 4), (2, 2), (1, 4), (3, 1), (2, 3), (1, 1), (3, 2)]


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    """Up to three collections over a small pool of features, so that features are often shared."""
    count = draw(st.integers(1, 3))
    dims = draw(st.sampled_from([(1,), (2,), (3,), (1, 2, 3, 8)]))
    tied = count > 1 and draw(st.booleans())
    weighted = tuple(draw(st.booleans()) for _ in range(count))
    collections = []
    for number in range(count):
        tables = []
        for _ in range(draw(st.integers(1, 4 if count > 1 else 9))):
            features = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
            half = not weighted[number] and draw(st.integers(0, 4)) == 0
            # Weights are defined for sum pooling only.
            mean = not weighted[number] and draw(st.booleans())
            tables.append(TableSpec(tuple(features), draw(st.sampled_from(dims)), mean, half))
        collections.append(tables)
    if tied:
        first = collections[0][0]
        last = collections[-1][0]
        half = first.half and not weighted[-1]
        collections[0][0] = dataclasses.replace(first, half=half)
        collections[-1][0] = dataclasses.replace(last, dim=first.dim, half=half)
    inputs = draw(st.integers(1, 2))
    calls = [(number, draw(st.integers(0, inputs - 1))) for number in draw(st.permutations(range(count)))]
    if draw(st.booleans()):
        calls.append((draw(st.integers(0, count - 1)), draw(st.integers(0, inputs - 1))))
    return ModelSpec(tuple(map(tuple, collections)), weighted, tuple(calls), inputs, tied, draw(st.booleans()))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Topology, int]:
    topology = Topology(*draw(st.sampled_from(SHAPES)))
    return topology, draw(st.sampled_from(valid_tower_counts(topology)))


def batch_sizes(draw: st.DrawFn, world: int) -> tuple[int, ...]:
    kind = draw(st.sampled_from(["equal", "unequal", "one", "none"]))
    if kind == "equal":
        return (draw(st.integers(1, 3)),) * world
    if kind == "one":
        busy = draw(st.integers(0, world - 1))
        return tuple(2 if rank == busy else 0 for rank in range(world))
    return (0,) * world if kind == "none" else tuple(draw(st.lists(st.integers(0, 3), min_size=world, max_size=world)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Topology, int, str, BatchSpec]:
    topology, towers = draw(layouts())
    sizes = batch_sizes(draw, topology.world_size)
    ids = draw(st.sampled_from([torch.int64, torch.int32]))
    batch = BatchSpec(sizes, ids, longest=draw(st.sampled_from([0, 1, 4])), seed=draw(st.integers(0, 9)))
    return draw(model_specs()), topology, towers, draw(st.sampled_from(["balanced", "strided"])), batch


def one_table(*features: int, dim: int = 3, mean: bool = False) -> TableSpec:
    return TableSpec(features, dim, mean)


# A feature of two tables, a table of two features, one collection called twice, a tied table, two inputs.
RICH = ModelSpec(
    collections=((one_table(0, 1), one_table(0, dim=2, mean=True)), (one_table(2), one_table(0, dim=1))),
    weighted=(False, True),
    calls=((1, 0), (0, 1), (0, 0)),
    inputs=2,
    tied=True,
    alias=True,
)
NINE = ModelSpec((tuple(one_table(i % 6, dim=1 + i % 3) for i in range(9)),), (False,), ((0, 0),))


@given(cases())
@example((RICH, Topology(4, 2), 4, "balanced", BatchSpec((2, 0, 1, 3, 0, 0, 1, 2))))
@example((RICH, Topology(2, 4), 2, "strided", BatchSpec((0, 0, 0, 0, 0, 5, 0, 0))))
@example((RICH, Topology(4, 2), 2, "balanced", BatchSpec((1,) * 8, torch.int32)))
@example((RICH, Topology(2, 4), 4, "balanced", BatchSpec((3,) * 8, longest=0)))
@example((NINE, Topology(4, 2), 4, "strided", BatchSpec((2, 2, 1, 2, 0, 2, 2, 2))))
@settings(SETTINGS, max_examples=15)
def test_every_stage_gives_each_rank_the_flat_model_on_its_samples(case: tuple[ModelSpec, Topology, int, str, BatchSpec]) -> None:
    spec, topology, towers, partition, batch = case
    model = SpecModel(spec)
    program = towerize(model, topology, towers=towers, partition=partition)
    inputs = model.inputs(batch)
    accept_empty_batches(model)
    with torch.no_grad():
        expected = [model(*given) for given in inputs]
        for name in STAGES:
            for rank, found in enumerate(run_ranks(program.stages[name], inputs)):
                assert bits_differ(found, expected[rank]) is None, (name, rank)


@contextlib.contextmanager
def dealt_as(inputs: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Give every rank these inputs instead of equal parts of one batch."""
    parts = [(tuple(given), {}) for given in inputs]
    with mock.patch("dmt_compile.verify.deal.deal", lambda *_: parts):
        yield


@given(cases())
@example((RICH, Topology(4, 2), 4, "balanced", BatchSpec((2, 0, 1, 3, 0, 0, 1, 2))))
@example((RICH, Topology(2, 4), 2, "strided", BatchSpec((0, 0, 0, 0, 0, 5, 0, 0))))
@settings(SETTINGS, max_examples=5)
def test_verify_passes(case: tuple[ModelSpec, Topology, int, str, BatchSpec]) -> None:
    spec, topology, towers, partition, batch = case
    model = SpecModel(spec)
    program = towerize(model, topology, towers=towers, partition=partition)
    if not sum(batch.sizes):
        with dealt_as(model.inputs(batch)), pytest.raises(InputError, match="at least one sample"):
            program.verify()
        return
    with dealt_as(model.inputs(batch)):
        certificate = program.verify()
    assert certificate.passed, str(certificate)
    assert certificate.batch_sizes == batch.sizes


@pytest.mark.parametrize("batch", [1, 3, 8, 13])
@pytest.mark.parametrize("shape, towers", [((4, 2), 4), ((2, 4), 2), ((4, 2), 2), ((2, 4), 8), ((4, 2), 1)])
def test_simulate_deals_the_batch_in_rank_order(shape: tuple[int, int], towers: int, batch: int) -> None:
    model = PooledOnly(table("a", ["x"], 3), table("b", ["y"], 2, mean=True), table("c", ["x"], 1))
    program = towerize(model, Topology(*shape), towers=towers)
    sparse = jagged(["x", "y"], batch)
    flat = model(sparse)
    world = program.topology.world_size
    for name in STAGES:
        found = program.simulate(sparse, stage=name)
        assert [len(part) for part in found] == [batch // world + (r < batch % world) for r in range(world)]
        assert torch.equal(torch.cat(found), flat)


def test_calling_the_program_is_the_flat_model() -> None:
    model = SpecModel(RICH)
    program = towerize(model, Topology(4, 2))
    (given,) = model.inputs(BatchSpec((9,)))
    assert bits_differ(program(*given), model(*given)) is None


def test_gradients_flow_across_ranks() -> None:
    model = PooledOnly(table("a", ["x"], 3), table("b", ["y"], 2))
    program = towerize(model, Topology(3, 2))
    sparse = jagged(["x", "y"], 11)
    sum(part.sum() for part in program.simulate(sparse)).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(sparse).sum() / 6).backward()
    for found, parameter in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


class TestTheChecksCanFail:
    """Each check of the certificate, against a program that is wrong in one way."""

    def program(self) -> tuple[TowerProgram, Any]:
        torch.manual_seed(0)
        model = PooledOnly(*(table(f"t{i}", [f"x{i}"], 4) for i in range(6)))
        return towerize(model, Topology(1, 3)), jagged([f"x{i}" for i in range(6)], 40)

    def failed(self, program: TowerProgram, batch: Any, **options: Any) -> set[str]:
        return {check.name for check in program.verify(batch, **options).checks if not check.passed}

    @pytest.mark.parametrize("scale", [1 / 3, 0.0, 1.001])
    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
    def test_scaled_gradient_of_one_table(self, scale: float, optimizer: Any) -> None:
        program, batch = self.program()
        forward = RankLookups.forward

        def scaled(self: RankLookups, routed: Any) -> torch.Tensor:
            rows = forward(self, routed)
            if self._reader is not None and any(read.lookup.table == "t3" for read in self._reader.reads) and rows.requires_grad:
                rows.register_hook(lambda grad: grad * scale)
            return rows

        def make(parameters: Any) -> torch.optim.Optimizer:
            return optimizer(parameters, lr=1e-3)

        with mock.patch.object(RankLookups, "forward", scaled):
            failed = self.failed(program, batch, optimizer=make)
        assert "gradients" in failed and not any(name.startswith("outputs") for name in failed)
        if optimizer is torch.optim.SGD:
            assert "parameters after 2 steps" in failed

    def test_other_values_in_one_table(self) -> None:
        program, batch = self.program()
        forward = RankLookups.forward

        def moved(self: RankLookups, routed: Any) -> torch.Tensor:
            return forward(self, routed) + torch.finfo(torch.float32).eps

        with mock.patch.object(RankLookups, "forward", moved):
            failed = self.failed(program, batch)
        assert {"outputs, stage classic", "outputs, stage sptt", "outputs, stage lowered"} <= failed
        assert "outputs, stage towers" not in failed

    def test_nothing_fails_without_a_change(self) -> None:
        program, batch = self.program()
        assert self.failed(program, batch) == set()

    def test_steps_can_be_left_out(self) -> None:
        program, batch = self.program()
        names = [check.name for check in program.verify(batch, steps=0).checks]
        assert "gradients" in names and not any("steps" in name for name in names)


class TestComparison:
    def test_a_missing_update_is_out_of_tolerance(self) -> None:
        start = {"w": torch.randn(100, generator=torch.Generator().manual_seed(0)) * 10}
        expected = {"w": start["w"] + 1e-3}
        assert furthest_change(start, expected, start)[0] > 10
        assert furthest_change(expected, expected, start) == (0.0, "")

    def test_rounding_of_the_parameter_is_within_tolerance(self) -> None:
        start = {"w": torch.full((4,), 1000.0)}
        expected = {"w": start["w"] + 1e-3}
        rounded = {"w": torch.nextafter(expected["w"], torch.tensor(2000.0))}
        assert 0 < furthest_change(rounded, expected, start)[0] <= 1

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_never_within_tolerance(self, bad: float) -> None:
        good = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}
        for key in good:
            wrong = {**good, key: torch.tensor([1.0, bad, 1.0])}
            for found, expected in ((wrong, good), (good, wrong)):
                assert furthest(found, expected) == (float("inf"), key)
            assert furthest(wrong, {**wrong, key: wrong[key].clone()}) == (0.0, "")
            hidden = {**good, key: torch.tensor([5.0, bad, 1.0])}
            assert furthest(hidden, wrong)[0] > 1

    def test_a_missing_gradient_is_zero(self) -> None:
        assert furthest({"a": None}, {"a": torch.zeros(2)})[0] == 0
        assert furthest({"a": None}, {"a": torch.ones(2)})[0] > 1

    def test_bits(self) -> None:
        nan = torch.tensor([1.0, float("nan")])
        assert bits_differ({"a": [nan]}, {"a": [nan.clone()]}) is None
        assert "against" in str(bits_differ([nan], [torch.tensor([1.0, 2.0])]))
        assert "different structure" in str(bits_differ({"a": nan}, {"b": nan}))
        assert "(2,)" in str(bits_differ(nan, nan.unsqueeze(0)))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_dropout(training: bool) -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled = PooledOnly(table("a", ["x"], 3), table("b", ["y"], 3))
            self.bottom = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.5))
            self.drop = nn.Dropout(0.5)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
            columns = self.drop(self.norm(self.pooled(sparse)))
            return self.norm(columns + self.bottom(dense)) * nn.functional.dropout(columns, 0.5, True)

    model = Top().train(training)
    program = towerize(model, Topology(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    certificate = program.verify(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), jagged(["x", "y"], 24))
    assert certificate.passed, str(certificate)
    assert torch.equal(state, torch.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training is training for module in model.modules())


def test_gradients_that_the_user_has_already_stay() -> None:
    model = PooledOnly(table("a", ["x"], 3), table("b", ["y"], 3))
    sparse = jagged(["x", "y"], 9)
    model(sparse).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: g.clone() for name, g in grads.items()}
    assert towerize(model, Topology(2, 2)).verify(sparse).passed
    for name, p in model.named_parameters():
        assert p.grad is grads[name] and torch.equal(p.grad, copies[name])


def test_without_anything_to_train_gradients_are_not_called_equal() -> None:
    model = PooledOnly(table("a", ["x"], 3)).requires_grad_(False)
    checks = {check.name: check for check in towerize(model, Topology(2, 2)).verify(jagged(["x"], 4)).checks}
    assert checks["outputs, stage lowered"].passed
    assert not checks["gradients"].passed
    assert "no output of the model depends on a trainable parameter" in checks["gradients"].found
