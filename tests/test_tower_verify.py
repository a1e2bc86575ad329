"""The certificate of programs with tower modules, their layout check, and wrong programs that both must refute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from mutants import Mutant, refuted_by_layout, remade
from torch import nn
from tower_models import CASES, DIM, TOWERS, Case, program
from tower_mutants import BESIDE, EVERYWHERE

import dmt_compile
from dmt_compile import PassError, Topology, TowerProgram, VerificationError, towerize
from dmt_compile.graphs import clone_sharing_tensors
from dmt_compile.runtime.pooled import RestoreColumns
from dmt_compile.runtime.tower_rows import RunTower, SendColumns
from dmt_compile.stage import PASS, STEP, Stage
from dmt_compile.towers.modules import DLRMTower
from dmt_compile.verify.cluster import simulate
from dmt_compile.verify.equivalence import Verifier
from dmt_compile.verify.layout import check_layout

STAGES = ["flat", "model", "towers", "classic", "sptt", "modules", "lowered"]

Grid = tuple[int, int, int]


@cache
def compiled(case: str, grid: Grid, tower: str) -> TowerProgram:
    return program(case, grid, tower)


def _calls(stage: Stage, kind: type[nn.Module]) -> list[Any]:
    return [stage.module(node) for node in stage.graph.nodes if node.op == "call_module" and isinstance(stage.module(node), kind)]


@pytest.mark.parametrize(
    ("case", "grid", "tower"),
    [
        ("dot", (2, 2, 2), "each"),
        ("dot", (1, 4, 2), "pass"),
        ("dot", (4, 2, 2), "list"),
        ("by mode", (2, 2, 2), "each"),
        ("beside", (2, 2, 2), "each"),
        ("beside", (4, 1, 2), "expanded"),
        ("torchrec", (4, 2, 2), "expanded"),
        ("torchrec dcn", (2, 2, 2), "cross"),
    ],
)
def test_certified(case: str, grid: Grid, tower: str) -> None:
    made = compiled(case, grid, tower)
    assert list(made.stages) == STAGES
    certificate = made.verify(*CASES[case].inputs(2 * grid[0] * grid[1] - 1, 3), optimizer=lambda p: torch.optim.Adam(p, eps=1e-3))
    assert certificate.passed, str(certificate)
    how = {check.name: check.how for check in certificate.checks}
    for name in ("towers", "classic", "sptt"):
        assert how[f"outputs, stage {name}"] == "bit for bit"
    for name in ("modules", "lowered"):
        assert "more rows at once" in how[f"outputs, stage {name}"]
        assert f"layout, stage {name}" in how
    assert {"gradients, stage towers", "gradients, stage modules", "gradients"} <= how.keys()
    found = {check.name: check.found for check in certificate.checks}
    assert found["table gradients, integers"].endswith("stages towers and sptt")
    assert "Certificate: " in str(certificate) and "equals the tower model" in str(certificate)


def test_certified_with_dropout_in_towers() -> None:
    """A tower draws for other samples than the model does on one device, so it is compared without."""
    made = program("dot", (2, 2, 2), "own")
    certificate = made.verify(*CASES["dot"].inputs(7, 3))
    assert certificate.passed, str(certificate)
    assert any("dropout in towers off" in check.how for check in certificate.checks)
    assert not any("dropout" in check.how for check in made.eval().verify(*CASES["dot"].inputs(7, 3)).checks)


def test_few_samples_and_empty_ranks() -> None:
    certificate = compiled("dot", (2, 2, 2), "both").verify(*CASES["dot"].inputs(3, 3))
    assert certificate.passed, str(certificate)
    assert certificate.batch_sizes == (1, 1, 1, 0)


@pytest.mark.parametrize("stage", ["modules", "lowered"])
@pytest.mark.parametrize("case", ["dot", "beside"])
def test_simulated(stage: str, case: str) -> None:
    made = compiled(case, (4, 2, 2), "both")
    given = CASES[case].inputs(11, 5)
    outputs = torch.cat(made.simulate(*given, stage=stage))
    torch.testing.assert_close(outputs, made(*given), rtol=1e-4, atol=1e-5)


class TestWhatTravels:
    def test_nothing_raw_where_towers_take_everything(self) -> None:
        stage = compiled("dot", (2, 2, 2), "each").stages["modules"]
        (send,) = _calls(stage, SendColumns)
        assert send.widths == send.made == tuple(one.columns for one in stage.vectors) and not send.raw
        assert not _calls(stage, RestoreColumns)
        names = {node.name for node in stage.graph.nodes}
        assert not names & {"restore", "columns_0", "output_0", "vectors_0", "module_0"}

    def test_only_what_is_read_elsewhere_is_raw(self) -> None:
        stage = compiled("beside", (2, 2, 2), "each").stages["modules"]
        (send,) = _calls(stage, SendColumns)
        lookups = stage.lookups.lookup
        taken = {name for one in stage.vectors for name in one.lookups}
        assert len(taken) == 5 and all(lookups[name].dim == DIM for name in taken)
        # The first field's vector is read as it is too; the others' are not.
        assert len(send.raw & taken) == 1
        rounds = {name: stage.lookups.sources[lookup.source].round for name, lookup in lookups.items()}
        assert {name for name in lookups if name not in taken and rounds[name] == 0} < send.raw
        assert sum(send.widths) == sum(one.columns for one in stage.vectors) + sum(lookups[name].dim for name in send.raw)

    def test_expanded_values_need_nothing_raw(self) -> None:
        stage = compiled("torchrec", (4, 2, 2), "expanded").stages["modules"]
        (send,) = _calls(stage, SendColumns)
        assert not send.raw and not _calls(stage, RestoreColumns)

    def test_a_tower_that_serves_no_vectors_sends_what_others_need(self) -> None:
        case = CASES["beside"]
        model = case.build()
        flat = towerize(model, Topology(2, 1), example_inputs=case.inputs(6, 7))
        wide = [name for name, one in flat.lookups.lookup.items() if one.dim == DIM]
        towers = [wide, [name for name in flat.lookups.lookup if name not in wide]]
        made = towerize(model, Topology(2, 1), towers=towers, example_inputs=case.inputs(6, 7), tower_module=DLRMTower(1, 0, 4))
        (send,) = _calls(made.stages["modules"], SendColumns)
        assert [one.tower for one in made.stages["modules"].vectors] == [0] and send.made[1] == 0 and send.widths[1] > 0
        certificate = made.verify(*case.inputs(5, 3))
        assert certificate.passed, str(certificate)

    def test_nodes_say_which_pass_made_them_for_which_step(self) -> None:
        stage = compiled("dot", (2, 2, 2), "each").stages["modules"]
        steps = {node.name: (node.meta.get(PASS), node.meta.get(STEP)) for node in stage.graph.nodes}
        for name in ("tower_vectors", "tower_module", "tower_send"):
            assert steps[name] == ("tower-modules", "f")
        for name in ("exchange_peer", "tower_columns_0"):
            assert steps[name] == ("tower-modules", "g")

    def test_a_flat_program_has_no_such_stage(self) -> None:
        case = CASES["dot"]
        made = towerize(case.build(), Topology(2, 2), example_inputs=case.inputs(6, 7))
        assert list(made.stages) == ["flat", "towers", "classic", "sptt", "lowered"]


def test_towers_that_share_a_parameter_are_refused() -> None:
    one = DLRMTower(c=1, p=0, dim=DIM)
    shared = one(2, DIM)
    case = CASES["dot"]
    with pytest.raises(
        PassError, match=r"belongs to tower 0 and to tower 1, .* give each tower a module with parameters of its own"
    ):
        towers = [["tables.0", "tables.1"], ["tables.2", "tables.3"]]
        _towerize_fields(case, towers, [shared, shared])


def _towerize_fields(case: Case, towers: list[list[str]], modules: Any) -> TowerProgram:
    model = _Fields()
    return towerize(model, Topology(2, 2), towers=towers, example_inputs=case.inputs(6, 7)[:1], tower_module=modules)


class _Fields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, DIM) for _ in range(4))
        self.top = nn.Linear(4 * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1))


# Wrong programs.

PROGRAMS = [("dot", (2, 2, 2), "both"), ("dot", (4, 1, 2), "expanded"), ("beside", (2, 2, 2), "both")]


def _inputs(case: str, world: int) -> list[Any]:
    return [(CASES[case].inputs(1 + (rank % 3), 40 + rank), {}) for rank in range(world)]


def refuted_by_running(stage: Stage, reference: Stage, case: str) -> bool:
    """Whether it fails, or makes outputs that are not the model's."""
    inputs = _inputs(case, stage.plan.topology.world_size)
    with torch.no_grad():
        expected = simulate(reference, inputs, [clone_sharing_tensors(stage.root) for _ in inputs])
        try:
            found = simulate(stage, inputs, [clone_sharing_tensors(stage.root) for _ in inputs])
        except Exception:
            return True
    return any(
        mine.shape != its.shape or not torch.allclose(mine, its, rtol=1e-4, atol=1e-5)
        for mine, its in zip(found, expected, strict=True)
    )


# Rounding to half precision is in the tolerance's reach on some values, columns that nobody needs change no result, and nor does
# the order of those that are only summed.
HARMLESS = {"raw_columns_that_nobody_needs", "rounded_to_half", "raw_columns_in_another_order"}


@pytest.mark.parametrize(("case", "grid", "tower"), PROGRAMS)
@pytest.mark.parametrize("stage", ["modules", "lowered"])
def test_the_program_itself_is_not_refuted(case: str, grid: Grid, tower: str, stage: str) -> None:
    made = compiled(case, grid, tower)
    untouched = remade(made.stages[stage], lambda m: None)
    check_layout(untouched)
    assert not refuted_by_running(untouched, made.stages["model"], case)


def _mutants(case: str) -> list[Callable[[Mutant], None]]:
    return [*EVERYWHERE, *(BESIDE if case == "beside" else ())]


@pytest.mark.parametrize(
    ("case", "grid", "tower", "spoil"),
    [(*one, spoil) for one in PROGRAMS for spoil in _mutants(one[0])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_mutant(case: str, grid: Grid, tower: str, spoil: Callable[[Mutant], None]) -> None:
    made = compiled(case, grid, tower)
    for name in ("modules", "lowered"):
        mutant = remade(made.stages[name], spoil)
        refuted_by_layout(mutant)
        if spoil.__name__ not in HARMLESS:
            assert refuted_by_running(mutant, made.stages["model"], case), name
    check_layout(made.stages["modules"])


@pytest.mark.parametrize(("case", "grid", "tower"), PROGRAMS)
def test_every_rewiring_that_changes_a_result_is_refuted(case: str, grid: Grid, tower: str) -> None:
    """Each argument of each node of the pass, replaced by other nodes that are computed before it."""
    made = compiled(case, grid, tower)
    stage = made.stages["modules"]
    nodes = list(stage.graph.nodes)
    refuted = 0
    for place, node in enumerate(nodes):
        if node.meta.get(PASS) != "tower-modules":
            continue
        for position, argument in enumerate(node.args):
            if argument not in nodes:
                continue
            for other in [n for n in nodes[:place] if n is not argument][(place + position) % 3 :: 3]:

                def rewire(m: Mutant, name: str = node.name, at: int = position, to: str = other.name) -> None:
                    m.set_args(name, **{f"_{at}": m.nodes[to]})

                mutant = remade(stage, rewire)
                try:
                    check_layout(mutant)
                except VerificationError:
                    refuted += 1
                else:
                    assert not refuted_by_running(mutant, made.stages["model"], case), (node.name, position, other.name)
    assert refuted > 30


class _Scaled(nn.Module):
    """A tower's module that is a little off."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.module(x)
        return made * 1.0001


class _ScaledRun(RunTower):
    def bind(self, context: Any) -> nn.Module:
        return _Scaled(super().bind(context))


def _verify(made: TowerProgram, stages: dict[str, Stage]) -> Any:
    from dmt_compile.verify.deal import batch_size, deal
    from dmt_compile.verify.equivalence import default_optimizer

    layout = made._dmt.analysis.layout
    inputs = deal(CASES["dot"].inputs(7, 3), {}, made.topology.world_size, layout)
    return Verifier(stages, inputs, [batch_size(*own, layout) for own in inputs], 0).certify(1, default_optimizer)


def test_a_module_that_is_a_little_off_fails_the_certificate() -> None:
    made = compiled("dot", (2, 2, 2), "both")

    def spoil(m: Mutant) -> None:
        m.swap_module("tower_module", lambda old: _ScaledRun(old.records, old.grid))

    stages = {**made.stages, "modules": remade(made.stages["modules"], spoil)}
    failed = {check.name for check in _verify(made, stages).checks if not check.passed}
    assert {"layout, stage modules", "outputs, stage modules", "gradients, stage modules"} <= failed
    assert "outputs, stage lowered" not in failed


def test_a_dense_layer_that_is_a_little_off_fails_the_certificate() -> None:
    """Behind the towers nothing is allowed for: same columns, same bits."""
    made = compiled("dot", (2, 2, 2), "both")

    def spoil(m: Mutant) -> None:
        (node,) = [n for n in m.graph.nodes if n.op == "output"]
        with m.graph.inserting_before(node):
            off = m.graph.call_function(torch.add, (node.args[0], 1e-6))
        node.args = (off,)

    stages = {**made.stages, "lowered": remade(made.stages["lowered"], spoil)}
    failed = {check.name: check.found for check in _verify(made, stages).checks if not check.passed}
    assert "outputs, stage lowered" in failed


def test_records_of_another_program() -> None:
    """Consistent, so that it would run; but the towers' modules are others."""
    stage = compiled("dot", (2, 2, 2), "both").stages["lowered"]
    other = dataclasses.replace(stage, vectors=tuple(dataclasses.replace(one, passes=True) for one in stage.vectors))
    assert "runs other modules than those that the towers have" in refuted_by_layout(other)


def test_wide_worlds_are_checked() -> None:
    case = CASES["torchrec"]
    made = dmt_compile.towerize(case.build(), Topology(32, 8), example_inputs=case.inputs(6, 7), tower_module=TOWERS["each"][0])
    check_layout(made.stages["lowered"])
