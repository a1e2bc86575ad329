"""Models none of whose tables can leave its rank: the program is the flat model on every rank, trained data-parallel."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import copied, gradients_of, merged, objective
from plain_models import BIG, Case, Inputs
from ranks import Ranks
from torch import nn

from dmt_compile import CaptureError, InputError, PlanError, Topology, TopologyError, TowerPlan, TowerProgram, towerize
from dmt_compile.runtime.rank_module import RankModule
from dmt_compile.verify.compare import bits_differ, furthest
from dmt_compile.verify.deal import deal

GRID = Topology(2, 3)
STAGES = ["flat", "towers", "classic", "sptt", "lowered"]


class NextItem(nn.Module):
    """A sequential recommender that scores every item with the table that it reads histories from."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.position = nn.Embedding(BIG, 4, padding_idx=0), nn.Embedding(5, 4)
        self.rnn, self.norm = nn.GRU(4, 4, batch_first=True), nn.BatchNorm1d(4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        history = batch["history"]
        rows = self.item(history) + self.position(torch.arange(history.shape[1]))
        return self.norm(self.rnn(rows)[0][:, -1]) @ self.item.weight.T


class OnlyTable(nn.Module):
    """A table and nothing else; a result that is nested."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(BIG, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        rows = self.item(x)
        return {"scores": rows @ self.item.weight.t(), "rows": [rows, 2]}


class ModesDiffer(nn.Module):
    """Scores all items in evaluation only; in training its table could be served, but has one place for both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.top = nn.Embedding(BIG, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.item(x)
        return self.top(rows) if self.training else rows @ self.item.weight.t()


class Scaled(nn.Module):
    """More tables that use scale_grad_by_freq than a message lists."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(BIG, 2, scale_grad_by_freq=True) for _ in range(11)])
        self.top = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.stack([table(x) for table in self.tables]).sum(0)).squeeze(1)


CASES = {
    "next item": Case(NextItem, lambda draw: ({"history": draw.id(BIG, 5)},)),
    "only a table": Case(OnlyTable, lambda draw: (draw.id(BIG),)),
    "modes differ": Case(ModesDiffer, lambda draw: (draw.id(BIG),)),
    "scaled": Case(Scaled, lambda draw: (draw.id(BIG),)),
}


def program(name: str, topology: Topology = GRID, **options: Any) -> TowerProgram:
    with pytest.warns(UserWarning, match="the model is left flat"):
        return towerize(CASES[name].build(), topology, example_inputs=CASES[name].example(), **options)


# One process


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("training", [True, False])
def test_every_stage_is_the_flat_model(name: str, training: bool) -> None:
    model = CASES[name].build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = towerize(model, GRID, example_inputs=CASES[name].example()).train(training)
    (told,) = [one for one in caught if one.category is UserWarning]
    assert told.filename == __file__
    model.train(training)
    args, _ = CASES[name].batch(14)
    assert list(compiled.stages) == STAGES and not compiled.lookups.lookups
    assert set(compiled.replicated) == {n for n, _ in model.named_parameters() if n.split(".")[0] in ("item", "position", "tables")}
    certificate = compiled.verify(*args)
    assert certificate.passed, str(certificate)
    assert bits_differ(compiled(*args), copy.deepcopy(model)(*args)) is None
    expected = [copy.deepcopy(model)(*own) for own, _ in deal(args, {}, 6)]
    for stage in STAGES:
        assert bits_differ(compiled.simulate(*args, stage=stage), expected) is None
        diff = compiled.diff("flat", stage)
        assert diff.added == diff.removed == diff.moved == diff.rewired == ()
        assert diff.kept == len(compiled.stages["flat"].graph.nodes) and str(diff)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert isinstance(copy.deepcopy(compiled), TowerProgram)


def test_verify_refutes_another_model() -> None:
    compiled = program("next item")
    graph = compiled.stages["lowered"].graph_module.graph
    (last,) = [node for node in graph.nodes if node.op == "output"]
    with graph.inserting_before(last):
        last.args = (graph.call_function(torch.neg, (last.args[0],)),)
    certificate = compiled.verify(*CASES["next item"].batch(14)[0])
    assert "outputs, stage lowered" in {check.name for check in certificate.checks if not check.passed}


def test_what_is_said() -> None:
    with pytest.warns(UserWarning) as caught:
        compiled = towerize(CASES["scaled"].build(), GRID, example_inputs=CASES["scaled"].example())
    (text,) = [str(one.message) for one in caught]
    lines = text.split("\n")
    assert len([line for line in lines if re.match(r"  tables\.\d\.weight: .*:\d+: it uses scale_grad_by_freq", line)]) == 8
    assert "  ... and 3 more" in lines
    assert "a parameter of its own" in lines[-1]
    with pytest.warns(UserWarning, match=r"  item\.weight: \S*test_left_flat\.py:\d+: it is also used as a weight here\n"):
        towerize(CASES["only a table"].build(), GRID, example_inputs=CASES["only a table"].example())
    assert len(compiled.replicated) == 11


def test_summary() -> None:
    text = str(program("next item"))
    lines = text.split("\n")
    assert lines[0] == "NextItem: left flat on 2 hosts x 3 ranks, no table is spread"
    assert "  256 B on each of 6 ranks; at most 256 B of gradients all-reduced in every step" in lines
    assert "  item.weight, 176 B" in lines and any("it is also used as a weight here" in line for line in lines)
    assert "Replicated: 2 tables on every rank" in lines
    assert not any(title in text for title in ("Towers", "Lookups found", "Bytes that a rank sends"))
    assert "Interactions found" in lines and "Stages" in lines
    assert max(map(len, lines)) <= 80 and text.isascii()


def test_what_towers_may_be() -> None:
    assert program("next item", towers=6).plan.grid.towers == 6
    plan = program("next item", towers=[[], []], partition="strided").plan
    assert TowerPlan.from_json(plan.to_json()).hash == plan.hash == program("next item", towers=plan).plan.hash
    example = CASES["next item"].example()
    with pytest.raises(TopologyError, match="4 towers do not fit"):
        towerize(NextItem(), GRID, towers=4, example_inputs=example)
    with pytest.raises(PlanError, match=r"names feature 'item', which the model does not look up; it has none"):
        towerize(NextItem(), GRID, towers=[["item"], []], example_inputs=example)


class OneMode(nn.Module):
    """Reads a table in one mode only, which must stay; ``also`` reads one in both modes."""

    def __init__(self, training: bool, also: bool) -> None:
        super().__init__()
        self.tied, self.other, self.top = nn.Embedding(BIG, 4), nn.Embedding(BIG, 4), nn.Linear(4, BIG)
        self.reads_in, self.also = training, also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.other(x) if self.also else torch.ones(len(x), 4)
        return self.tied(x) @ self.tied.weight.t() + self.top(rows) if self.training == self.reads_in else self.top(rows)


@pytest.mark.parametrize("training", [True, False])
def test_a_mode_without_lookups(training: bool) -> None:
    """Refused where one mode has none at all; a table that only one mode reads and keeps does not hinder the others."""
    example = (torch.zeros(4, dtype=torch.long),)
    with pytest.raises(CaptureError, match="no embedding lookup was found"):
        towerize(OneMode(training, False), GRID, example_inputs=example)
    compiled = towerize(OneMode(training, True), GRID, example_inputs=example)
    assert [table.name for table in compiled.lookups.tables] == ["other"]
    for mode in (True, False):
        assert compiled.train(mode).verify(torch.arange(9)).passed
        assert ("tied.weight" in compiled.replicated) == (mode == training)


# Ranks


STEPS = 3
RATE = 0.1


def _batch(name: str, step: int, rank: int, world: int) -> Inputs:
    return CASES[name].batch(2 + (rank + step) % 3, seed=100 * step + rank)


def train_on_ranks(name: str, grid: tuple[int, int], norm: float) -> Any:
    """Runs on a rank: outputs, gradients and clipped norms of every step; the state dicts, and the traffic, after all."""
    module = program(name, Topology(*grid)).distribute()
    rank, world = dist.get_rank(), dist.get_world_size()
    assert not list(module.table_parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        args, kwargs = _batch(name, step, rank, world)
        output = module(*args, **kwargs)
        objective(output).backward()
        gradients = gradients_of(module)
        steps.append((copied(output), gradients, float(module.clip_grad_norm_(norm))))
        optimizer.step()
    own, full = {k: v.clone() for k, v in module.state_dict().items()}, module.full_state_dict()
    traffic = (module.traffic.inside_host, module.traffic.across_hosts)
    module.close()
    return steps, own, full, traffic


@pytest.mark.multi_rank
@pytest.mark.parametrize(
    ("name", "grid"), [("next item", (3, 2)), ("only a table", (2, 1)), ("modes differ", (2, 3)), ("scaled", (1, 2))]
)
def test_steps_equal_one_process(ranks: Ranks, name: str, grid: tuple[int, int]) -> None:
    world, norm = grid[0] * grid[1], 0.5
    found = ranks(world, train_on_ranks, name, grid, norm)
    flat = CASES[name].build()
    # Buffers are each rank's own, so every rank has a flat model of its own around the same parameters.
    replicas = [copy.deepcopy(flat) for _ in range(world)]
    optimizer = torch.optim.SGD(flat.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        terms = []
        for rank, replica in enumerate(replicas):
            args, kwargs = _batch(name, step, rank, world)
            for mine, theirs in zip(replica.parameters(), flat.parameters(), strict=True):
                mine.data, mine.grad = theirs.data, None
            output = replica(*args, **kwargs)
            if step == 0:
                assert bits_differ(found[rank][0][step][0], copied(output)) is None
            objective(output).backward()
            terms.append({n: p.grad for n, p in replica.named_parameters() if p.grad is not None})
        for parameter_name, parameter in flat.named_parameters():
            if parameter_name in terms[0]:
                parameter.grad = torch.stack([own[parameter_name] for own in terms]).sum(0) / world
        mine = merged([steps[step][1] for steps, *_ in found], set())
        assert mine.keys() == terms[0].keys()
        worst, parameter_name = furthest(mine, {n: p.grad for n, p in flat.named_parameters() if n in mine})
        assert worst <= STEPS, (parameter_name, worst)
        expected = nn.utils.clip_grad_norm_(flat.parameters(), norm)
        for steps, *_ in found:
            torch.testing.assert_close(torch.tensor(steps[step][2]), expected)
        optimizer.step()
    for rank, (_, own, full, (inside, across)) in enumerate(found):
        expected_state = {**replicas[rank].state_dict(), **dict(flat.named_parameters())}
        assert list(own) == list(full) == list(flat.state_dict())
        assert bits_differ(own, full) is None
        counters = {key for key, value in full.items() if not value.dtype.is_floating_point}
        assert all(torch.equal(full[key], expected_state[key]) for key in counters)
        worst, key = furthest(*({k: v for k, v in state.items() if k not in counters} for state in (full, expected_state)))
        assert worst <= STEPS, (key, worst)
        # Three numbers of eight bytes for every other rank, once a step.
        assert (inside, across) == (STEPS * 24 * (grid[1] - 1), STEPS * 24 * (world - grid[1]))


def _spoiled(kind: str) -> Inputs:
    args, kwargs = CASES["next item"].batch(3)
    history = args[0]["history"]
    if kind == "key":
        args = ({"item": history},)
    elif kind == "id":
        args = ({"history": history + 100},)
    elif kind == "argument":
        args = ()
    return args, kwargs


def fail_on_ranks(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Runs on a rank: what it raised in steps that rank 1 cannot run, each with two good steps behind it."""
    module: RankModule = program("next item", Topology(1, 2)).distribute()
    found = []
    for kind in kinds:
        args, kwargs = _spoiled(kind if dist.get_rank() == 1 else "")
        try:
            module(*args, **kwargs)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        for training in (True, False):
            args, kwargs = _spoiled("")
            objective(module.train(training)(*args, **kwargs)).backward()
        module.train()
    loss = objective(module(*_spoiled("")[0]))
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except Exception as error:
        found.append((type(error).__name__, str(error)))
    with module.no_sync():
        objective(module(*_spoiled("")[0])).backward()
    objective(module(*_spoiled("")[0])).backward()
    module.close()
    return found


@pytest.mark.multi_rank
def test_a_rank_that_fails_in_forward_stops_the_step_on_all(ranks: Ranks) -> None:
    """Also in later steps, and also what only the model itself sees; the next step follows."""
    kinds = ["key", "id", "key", "argument"]
    good, bad = ranks(2, fail_on_ranks, kinds, collective=20.0)
    assert [error for error, _ in bad] == ["InputError", "IndexError", "InputError", "TypeError", "DistributedError"]
    assert [error for error, _ in good] == ["DistributedError"] * 5
    assert all("rank 1 could not use its batch" in message for _, message in good[:4])
    assert "a second backward since the last forward" in good[4][1] and good[4] == bad[4]


def break_on_ranks() -> str:
    """Runs on a rank: rank 1 is gone, and rank 0 is told."""
    module = program("next item", Topology(1, 2)).distribute()
    args, _ = CASES["next item"].batch(3)
    module(*args)
    if dist.get_rank() == 1:
        module.close()
        return ""
    try:
        module(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing raised"


@pytest.mark.multi_rank
def test_a_rank_that_leaves_ends_the_others(ranks: Ranks) -> None:
    assert ranks(2, break_on_ranks, collective=20.0) == ["DistributedError", ""]


def differ_on_ranks() -> None:
    model = CASES["only a table"].build()
    if dist.get_rank():
        model.item.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="left flat"):
        compiled = towerize(model, Topology(2, 1), example_inputs=CASES["only a table"].example())
    compiled.distribute()


@pytest.mark.multi_rank
def test_ranks_compare_their_models(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(2, differ_on_ranks):
        assert outcome.error == "DistributedError" and "item.weight" in outcome.message


def meta_on_ranks() -> Any:
    """Runs on a rank: a model without values gets some, the same everywhere."""
    with torch.device("meta"):
        model = OnlyTable()
    args, _ = CASES["only a table"].batch(4)
    with pytest.warns(UserWarning, match="left flat"):
        compiled = towerize(model, Topology(2, 1), example_inputs=tuple(x.to("meta") for x in args))
    module = compiled.distribute(device="cpu")
    objective(module(*args)).backward()
    found = module.item.weight.detach().clone(), module.item.weight.grad
    module.close()
    return found


@pytest.mark.multi_rank
def test_a_model_on_the_meta_device(ranks: Ranks) -> None:
    (value, gradient), others = ranks(2, meta_on_ranks)
    assert torch.equal(value, others[0]) and torch.equal(gradient, others[1])
    assert bool(value.isfinite().all()) and bool(value.any()) and bool(gradient.any())


def test_a_bad_batch_on_one_device() -> None:
    with pytest.raises(InputError, match=r"the batch has no batch\['history'\]"):
        program("next item")({"item": torch.zeros(2, 5, dtype=torch.long)})
