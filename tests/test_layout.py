"""What the layout check and the passes' contracts say about programs that are right, about schedules, and about bad batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import ModelSpec, PooledOnly, SpecModel, TableSpec, collection, dense, jagged, run_ranks, table, torchrec_model
from torch import nn
from torchrec import KeyedJaggedTensor

from dmt_compile import InputError, PassError, PlanError, Topology, VerificationError, towerize
from dmt_compile.passes import pipeline
from dmt_compile.passes.base import Draft
from dmt_compile.passes.split_towers import SplitTowers
from dmt_compile.runtime.pooled import RestoreColumns
from dmt_compile.stage import ALL_TO_ALL, PASS, STEP, WAIT, Stage
from dmt_compile.topology import valid_tower_counts
from dmt_compile.verify.layout import check_layout

SETTINGS = settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 30), st.data())
@SETTINGS
def test_every_program_that_the_passes_make_is_accepted(hosts: int, ranks: int, tables: int, data: st.DataObject) -> None:
    topology = Topology(hosts, ranks)
    towers = data.draw(st.sampled_from(valid_tower_counts(topology)))
    specs = tuple(TableSpec((i % 7,), 1 + i % 3, i % 2 == 1) for i in range(tables))
    program = towerize(SpecModel(ModelSpec((specs,), (False,), ((0, 0),))), topology, towers=towers)
    for name in ("classic", "sptt", "lowered"):
        check_layout(program.stages[name])


def test_a_large_program_is_checked() -> None:
    program = towerize(torchrec_model("DLRM"), Topology(32, 8))
    check_layout(program.stages["lowered"])


def test_the_message_names_the_users_line() -> None:
    program = towerize(PooledOnly(table("a", ["x"]), table("b", ["y"])), Topology(2, 2))
    draft = Draft(program.stages["sptt"], "mutant")
    draft.extras["restore"] = RestoreColumns(program.lookups, draft.extras["restore"].arrival[::-1])
    with pytest.raises(VerificationError) as caught:
        check_layout(draft.finish("sptt"))
    assert "models.py:" in str(caught.value) and "pass 'sptt', stage 'sptt': node 'restore'" in str(caught.value)


class TestContracts:
    def test_a_pass_takes_its_own_stage_only(self) -> None:
        stages = towerize(PooledOnly(table("a", ["x"])), Topology(2, 2)).stages
        for graph_pass, name in zip(pipeline.PIPELINE, ("towers", "classic", "sptt", "lowered", "lowered"), strict=True):
            takes = " or ".join(map(repr, graph_pass.takes))
            with pytest.raises(PassError, match=f"pass '{graph_pass.name}' takes stage {takes}, got '{name}'"):
                graph_pass.apply(stages[name])

    def test_a_wrong_rewrite_is_caught_by_what_its_pass_ensures(self) -> None:
        from dmt_compile.passes.sptt import Sptt

        class Careless(Sptt):
            def rewrite(self, draft: Draft) -> None:
                super().rewrite(draft)
                (shuffle,) = [n for n in draft.graph.nodes if n.name == "shuffle"]
                shuffle.replace_all_uses_with(shuffle.args[0])  # type: ignore[arg-type]
                draft.erase(shuffle)

        stages = towerize(PooledOnly(table("a", ["x"])), Topology(2, 2)).stages
        with pytest.raises(VerificationError) as caught:
            Careless().apply(stages["classic"])
        assert "(what pass 'sptt' ensures, on stage 'sptt')" in caught.value.__notes__

    def test_ids_that_need_another_lookup_of_their_round_are_refused_with_the_users_line(self) -> None:
        class Chained(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = collection(table("a", ["x"]))
                self.b = collection(table("b", ["y"]))

            def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
                ids = self.a(sparse).values().argmax(dim=1)
                second = KeyedJaggedTensor(keys=["y"], values=ids, lengths=torch.ones_like(ids))
                return self.b(second).values()

        program = towerize(Chained(), Topology(2, 2))
        assert [[x.name for x in one.lookups] for one in program.lookups.rounds] == [["x"], ["y"]]
        # All in one round, as they must not be.
        flat = program.stages["flat"]
        sources = tuple(replace(source, round=0) for source in flat.lookups.sources)
        with pytest.raises(PassError, match=r"\(.*test_layout.py:\d+\) computes ids from the result of another lookup"):
            SplitTowers().apply(replace(flat, lookups=replace(flat.lookups, sources=sources)))

    def test_stages_do_not_share_graphs(self) -> None:
        stages = towerize(PooledOnly(table("a", ["x"])), Topology(2, 2)).stages
        before = {name: str(stage.graph) for name, stage in stages.items()}
        for node in reversed(list(stages["sptt"].graph.nodes)):
            if not node.users and node.op != "output":
                stages["sptt"].graph.erase_node(node)
        stages["sptt"].graph.output(None)
        assert {n: str(s.graph) for n, s in stages.items() if n != "sptt"} == {n: t for n, t in before.items() if n != "sptt"}

    def test_provenance(self) -> None:
        stages = towerize(PooledOnly(table("a", ["x"])), Topology(2, 2)).stages
        steps = {node.name: (node.meta.get(PASS), node.meta.get(STEP)) for node in stages["sptt"].graph.nodes}
        assert steps["route"] == ("classic-exchange", "a") and steps["lookup"] == ("classic-exchange", "b")
        assert [steps[n] for n in ("permute", "exchange_tower", "shuffle", "exchange_peer")] == [("sptt", s) for s in "cdeg"]
        assert all("models.py" in str(node.stack_trace) for node in stages["lowered"].graph.nodes if PASS in node.meta)

    def test_stage_names(self) -> None:
        program = towerize(PooledOnly(table("a", ["x"])), Topology(2, 2))
        assert list(program.stages) == ["flat", "towers", "classic", "sptt", "lowered"]
        with pytest.raises(PlanError, match="stage must be one of flat, towers"):
            program.simulate(jagged(["x"], 4), stage="modules")


# The schedule


class Dense(nn.Module):
    """A bottom layer that does not need embeddings, written after the lookup."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = collection(table("a", ["x"], 4), table("b", ["y"], 4))
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
        self.drop = nn.Dropout(0.5)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        columns = self.ebc(sparse).values()
        return columns * self.bottom(dense)


class DropsBoth(Dense):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        columns = self.drop(self.ebc(sparse).values())
        return columns + self.drop(self.bottom(dense))


class DropsDenseFirst(Dense):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        dense = nn.functional.dropout(dense, 0.5)
        weights = torch.rand_like(dense)
        return self.drop(self.ebc(sparse).values()) + self.bottom(dense * weights)


class WritesAfterUse(Dense):
    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        base = dense * 1.0
        columns = self.ebc(sparse).values()[:, :4] + base
        base.mul_(2.0)
        return columns - base.exp()


class WritesIds(Dense):
    """Ids are changed in place before they are looked up; dense layers come in between."""

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        values = sparse.values() * 1
        values.remainder_(5)
        ids = KeyedJaggedTensor(keys=["x", "y"], values=values, lengths=sparse.lengths())
        return self.ebc(ids).values() * bottom


@pytest.mark.parametrize("kind", [Dense, DropsBoth, DropsDenseFirst, WritesAfterUse, WritesIds])
def test_the_schedule_changes_no_result(kind: type[Dense]) -> None:
    program = towerize(kind(), Topology(3, 2))
    certificate = program.verify(dense(13), jagged(["x", "y"], 13), steps=0)
    assert certificate.passed, str(certificate)


def between_start_and_wait(stage: Stage) -> list[str]:
    nodes = list(stage.graph.nodes)
    start = next(i for i, n in enumerate(nodes) if n.target is ALL_TO_ALL and n.args[3] == "peer")
    wait = next(i for i, n in enumerate(nodes) if n.target is WAIT and n.args[0] is nodes[start])
    return [str(n.target) for n in nodes[start + 1 : wait]]


def test_dense_layers_run_while_rows_travel() -> None:
    hidden = between_start_and_wait(towerize(Dense(), Topology(4, 2)).stages["lowered"])
    assert hidden == ["bottom.0", "bottom.1"]
    hidden = between_start_and_wait(towerize(torchrec_model("DLRM"), Topology(4, 2)).stages["lowered"])
    assert any("dense_arch" in target for target in hidden)


def test_what_draws_random_numbers_keeps_its_place() -> None:
    hidden = between_start_and_wait(towerize(DropsBoth(), Topology(4, 2)).stages["lowered"])
    assert hidden == []


def test_all_id_collectives_start_before_the_first_of_their_waits() -> None:
    graph = towerize(PooledOnly(table("a", ["x"]), weighted=True), Topology(2, 2)).stages["lowered"].graph
    names = [n.name for n in graph.nodes]
    starts = [names.index(f"{kind}_all_to_all") for kind in ("lengths", "values", "weights")]
    waits = [names.index(f"{kind}_wait") for kind in ("lengths", "values", "weights")]
    assert max(starts) < min(waits)


# Batches that do not fit


def good(**changes: Any) -> KeyedJaggedTensor:
    batch = jagged(["x", "y"], 8, weighted=True)
    parts = {"keys": ["x", "y"], "values": batch.values(), "lengths": batch.lengths(), "weights": batch.weights()}
    return KeyedJaggedTensor(**{**parts, **changes})


IDS, LENGTHS = good().values(), good().lengths()
STRIDES = {"lengths": torch.tensor([1, 2, 2]), "stride_per_key_per_rank": [[2], [1]], "values": IDS[:5], "weights": None}

BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "feature missing": (good(keys=["x", "z"]), ("no feature 'y'", "'sparse'", "'x', 'z'")),
    "lengths of half a feature": (good(lengths=LENGTHS[:-1]), ("15 lengths", "2 features")),
    "lengths too long": (good(lengths=LENGTHS + 1), ("add up to", f"there are {IDS.numel()}")),
    "negative lengths": (good(lengths=torch.cat([LENGTHS[:1] - 5, LENGTHS[1:2] + 5, LENGTHS[2:]])), ("negative lengths",)),
    "id too large": (good(values=IDS + 12), ("feature 'x' has id", "outside its table of 12 rows")),
    "id negative": (good(values=IDS - 12), ("feature 'x' has id -", "outside its table of 12 rows")),
    "too few weights": (good(weights=torch.ones(3)), (f"3 weights for {IDS.numel()} ids",)),
    "variable stride": (KeyedJaggedTensor(keys=["x", "y"], **STRIDES), ("variable stride", "'x', 'y'")),
    "a tensor": (torch.ones(8, 2), ("'sparse' must be a torchrec KeyedJaggedTensor, got Tensor",)),
    "nothing": (None, ("no samples to deal",)),
    "an object": (object(), ("cannot be dealt over ranks",)),
}


@pytest.mark.parametrize("method", ["verify", "simulate"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("weighted", [False, True])
def test_bad_batch(bad: str, method: str, weighted: bool) -> None:
    program = towerize(PooledOnly(table("a", ["x", "y"]), weighted=weighted), Topology(2, 2))
    batch, parts = BAD[bad]
    with pytest.raises(InputError) as caught:
        getattr(program, method)(batch)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


CALLED = ("feature missing", "lengths of half a feature", "lengths too long", "too few weights", "variable stride", "a tensor")


@pytest.mark.parametrize("bad", CALLED)
def test_bad_batch_of_a_called_program(bad: str) -> None:
    program = towerize(PooledOnly(table("a", ["x", "y"]), weighted=True), Topology(2, 2))
    with pytest.raises(InputError, match=r"'sparse'|'y'"):
        program(BAD[bad][0])


@pytest.mark.parametrize("method", ["verify", "simulate", "__call__"])
def test_weights_missing(method: str) -> None:
    program = towerize(PooledOnly(table("a", ["x", "y"]), weighted=True), Topology(2, 2))
    with pytest.raises(InputError, match="'sparse' has no weights, but a weighted EmbeddingBagCollection reads 'x', 'y' from it"):
        getattr(program, method)(good(weights=None))


def test_inputs_that_disagree_on_the_batch_size() -> None:
    program = towerize(Dense(), Topology(2, 2))
    for method in (program.verify, program.simulate):
        with pytest.raises(InputError, match=r"disagree on the batch size \(dimension 0\): inputs\[0\]\[0\] \(8, 4\): 8, .*: 7"):
            method(dense(8), jagged(["x", "y"], 7))


def test_a_bad_batch_of_one_rank_only() -> None:
    program = towerize(PooledOnly(table("a", ["x"])), Topology(2, 2))
    inputs = [(jagged(["x"], 2, seed=r),) for r in range(4)]
    inputs[2] = (jagged(["x"], 2, longest=3, rows=500, seed=1),)
    with pytest.raises(InputError, match="feature 'x' has id"):
        run_ranks(program.stages["lowered"], inputs)
