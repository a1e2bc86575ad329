"""Plain PyTorch lookups in every style: the compiled program of every rank against the flat model, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plain_models import BIG, CASES, Draw
from torch import nn

from dmt_compile import Topology, TowerProgram, towerize
from dmt_compile.graphs import clone_sharing_tensors
from dmt_compile.topology import valid_tower_counts
from dmt_compile.verify.cluster import simulate
from dmt_compile.verify.compare import bits_differ
from dmt_compile.verify.deal import deal_sizes

STAGES = ("towers", "classic", "sptt", "lowered")
TOPOLOGIES = [(2, 3), (3, 2), (1, 4), (4, 1), (2, 1), (4, 2), (1, 1)]


def compiled(name: str, topology: Topology, towers: int | None = None, **options: Any) -> tuple[nn.Module, TowerProgram]:
    case = CASES[name]
    model = case.build()
    return model, towerize(model, topology, towers=towers, example_inputs=case.example(), **options)


def check_ranks(program: TowerProgram, model: nn.Module, parts: list[Any], stages: tuple[str, ...]) -> None:
    """Every rank's outputs are the flat model's on its own samples, whatever their number."""
    with torch.no_grad():
        expected = [copy.deepcopy(model)(*args, **kwargs) for args, kwargs in parts]
        for stage in stages:
            roots = [clone_sharing_tensors(program.stages[stage].root, copy_buffers=True) for _ in parts]
            for rank, found in enumerate(simulate(program.stages[stage], parts, roots)):
                assert bits_differ(found, expected[rank]) is None, (stage, rank)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[str, Topology, int, str, tuple[int, ...], torch.dtype, int]:
    topology = Topology(*draw(st.sampled_from(TOPOLOGIES)))
    sizes = draw(st.lists(st.integers(0, 3), min_size=topology.world_size, max_size=topology.world_size))
    return (
        draw(st.sampled_from(sorted(CASES))),
        topology,
        draw(st.sampled_from(valid_tower_counts(topology))),
        draw(st.sampled_from(["balanced", "strided"])),
        tuple(sizes),
        draw(st.sampled_from([torch.int32, torch.int64])),
        draw(st.integers(0, 9)),
    )


@given(dealt())
@example(("offsets", Topology(2, 3), 2, "balanced", (0, 2, 0, 3, 1, 0), torch.int32, 1))
@example(("stacked offsets", Topology(3, 2), 3, "strided", (0, 2, 0, 3, 1, 0), torch.int32, 1))
@example(("history", Topology(2, 3), 6, "balanced", (0, 0, 0, 0, 0, 2), torch.int64, 1))
@example(("field major", Topology(3, 2), 1, "balanced", (0, 1, 0, 0, 2, 1), torch.int64, 1))
@settings(derandomize=True, deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_each_rank_has_the_flat_model_on_its_samples(case: tuple[Any, ...]) -> None:
    name, topology, towers, partition, sizes, ids, seed = case
    model, program = compiled(name, topology, towers, partition=partition)
    args, kwargs = CASES[name].batch(sum(sizes), seed, ids)
    if not sum(sizes):
        sizes = (1, *sizes[1:])
        args, kwargs = CASES[name].batch(1, seed, ids)
    check_ranks(program, model, deal_sizes(args, kwargs, sizes, program._dmt.analysis.layout), ("sptt", "lowered"))


@pytest.mark.parametrize("name", sorted(CASES))
def test_verify(name: str) -> None:
    """A batch with fewer samples than ranks, so that some have none, after one with more; the model is as it was."""
    model, program = compiled(name, Topology(2, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    for batch, steps in ((13, 0), (4, 1)):
        args, kwargs = CASES[name].batch(batch, seed=batch)
        certificate = program.verify(*args, **kwargs, steps=steps)
        assert certificate.passed, str(certificate)
    assert list(program.state_dict()) == list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == flags
    # The parameters are the model's own, under the same names.
    assert [id(p) for p in program.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("name", sorted(CASES))
def test_simulate_and_the_program_itself(name: str) -> None:
    model, program = compiled(name, Topology(3, 1))
    for batch in (1, 8):
        args, kwargs = CASES[name].batch(batch, ids=torch.int32)
        with torch.no_grad():
            assert bits_differ(program(*args, **kwargs), model(*args, **kwargs)) is None
        parts = deal_sizes(args, kwargs, [batch // 3 + (r < batch % 3) for r in range(3)], program._dmt.analysis.layout)
        with torch.no_grad():
            expected = [model(*a, **k) for a, k in parts]
            assert bits_differ(program.simulate(*args, **kwargs), expected) is None


def test_every_table_is_found() -> None:
    """What is served is listed, so that a lookup which silently stays dense is seen."""
    for name, case in CASES.items():
        model, program = compiled(name, Topology(2, 2))
        served = {table.parameter for table in program.lookups.tables}
        modules = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        bare = {path for path, _ in model.named_parameters() if name in ("bags", "functional", "offsets") and "." not in path}
        assert served | set(program.replicated) >= {p for p in modules | bare if p in dict(model.named_parameters())}, name
        assert bool(program.replicated) == (name == "refusing")
        assert case.batch(2) is not None


@pytest.mark.parametrize("name", ["offsets", "stacked offsets", "functional"])
@pytest.mark.parametrize("optimizer", ["SparseAdam", "SGD"])
def test_sparse_gradients(name: str, optimizer: str) -> None:
    """Tables whose gradients are sparse in the flat model have sparse gradients on their owner."""
    model, program = compiled(name, Topology(2, 2))
    if optimizer == "SparseAdam":
        sparse = {table.parameter for table in program.lookups.tables if any(x.sparse for x in _readers(program, table.name))}
        assert sparse

    def make(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        if optimizer == "SGD":
            return torch.optim.SGD(listed, lr=0.1)
        # The verifier's parameters come in the model's order.
        chosen = [p for (n, _), p in zip(model.named_parameters(), listed, strict=True) if n in sparse]
        return torch.optim.SparseAdam(chosen, lr=0.1, eps=1e-2)

    args, kwargs = CASES[name].batch(9)
    certificate = program.verify(*args, **kwargs, optimizer=make, steps=3)
    assert certificate.passed, str(certificate)
    sum(part.sum() for part in program.simulate(*args, **kwargs)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(*args, **kwargs).sum().backward()
    expected = {n: p.grad.is_sparse for n, p in model.named_parameters() if p.grad is not None}
    assert {n: g.is_sparse for n, g in grads.items()} == expected and any(expected.values())


def _readers(program: TowerProgram, table: str) -> Any:
    return program.lookups.lookups_of_table[table]


def test_lookups_without_gradients_get_none() -> None:
    """Not zeros: an optimizer with weight decay, or with momentum, would move the table."""
    model, program = compiled("mixed", Topology(2, 2))
    args, _ = CASES["mixed"].batch(9)
    sum(part.sum() for part in program.simulate(*args)).backward()
    assert model.still.weight.grad is None and model.frozen.weight.grad is None
    # Half of the lookups of this table are made under no_grad: the gradient is that of the other half.
    found = model.some.weight.grad.clone()
    model.zero_grad()
    (model(*args).sum() / 4).backward()
    torch.testing.assert_close(found, model.some.weight.grad)
    decaying = program.verify(*args, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1))
    assert decaying.passed, str(decaying)


def test_nothing_to_train() -> None:
    model = CASES["one table"].build().requires_grad_(False)
    program = towerize(model, Topology(2, 2), example_inputs=CASES["one table"].example())
    args, _ = CASES["one table"].batch(9)
    checks = {check.name: check for check in program.verify(*args).checks}
    assert checks["outputs, stage lowered"].passed and not checks["gradients"].passed


class Both(nn.Module):
    """A TorchRec collection beside plain tables, with the names of its features and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = models.collection(models.table("t", ["user"], 2), models.table("item", ["x", "user"], 3, mean=True))
        self.user, self.item, self.t = nn.Embedding(BIG, 2), nn.EmbeddingBag(BIG, 3), nn.Embedding(BIG, 1)

    def forward(self, sparse: Any, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        found = [self.user(user), self.item(item), self.t(user), self.ebc(sparse).values()]
        return torch.cat(found, dim=1)


def test_beside_a_collection() -> None:
    def batch(size: int) -> tuple[Any, ...]:
        draw = Draw(size)
        return models.jagged(["user", "x"], size), draw.id(BIG), draw.id(BIG, 2)

    model = Both()
    program = towerize(model, Topology(2, 3), example_inputs=batch(6))
    assert len(program.lookups.table) == len(program.lookups.tables) == 5
    assert len(program.lookups.lookup) == len(program.lookups.lookups) == 6
    certificate = program.verify(*batch(13))
    assert certificate.passed, str(certificate)
    # Without example inputs the collection is served and the rest says what it needs.
    with pytest.warns(UserWarning, match=r"3 tables stay on every rank \(user\.weight, .*only with example_inputs="):
        alone = towerize(model, Topology(2, 3))
    assert set(alone.replicated) == {"user.weight", "item.weight", "t.weight"}
    assert all("example_inputs=" in reason for reason in alone.replicated.values())
    assert alone.verify(*batch(13), steps=0).passed


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_example_samples(size: int) -> None:
    """Also one: then the model is run on no samples as well, to see which dimension grows."""
    case = CASES["history"]
    program = towerize(case.build(), Topology(2, 2), example_inputs=case.example(size))
    assert not program.replicated
    args, _ = case.batch(6)
    assert program.verify(*args, steps=0).passed


def test_a_feature_can_be_given_a_tower() -> None:
    case = CASES["history"]
    towers = [["batch['item']", "batch['history']"], ["user"]]
    program = towerize(case.build(), Topology(2, 2), towers=towers, example_inputs=case.example())
    assert [tower.features for tower in program.plan.towers] == [("item@batch['item']", "item@batch['history']"), ("user",)]


def test_more_towers_than_tables() -> None:
    case = CASES["sequence only"]
    program = towerize(case.build(), Topology(4, 2), example_inputs=case.example())
    assert sum(not tower.features for tower in program.plan.towers) == 3
    args, _ = case.batch(5)
    assert program.verify(*args, steps=1).passed
