"""A rank that fails: every rank gets an error that says why, and nothing waits for ever."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from distributed_cases import build, inputs_of, objective
from ranks import Outcome, RankError, Ranks
from torch import nn
from torchrec import KeyedJaggedTensor

import dmt_compile
from dmt_compile import DistributedError, InputError, Topology
from dmt_compile.runtime.groups import refuse_device
from dmt_compile.runtime.rank_module import RankModule

pytestmark = pytest.mark.multi_rank

NAME = "two collections"
WAIT = 6.0
"""Seconds for collectives that are meant to break."""


def _module(**options: Any) -> RankModule:
    return dmt_compile.towerize(build(NAME), Topology(dist.get_world_size() // 2, 2)).distribute(**options)


def _good(seed: int = 0) -> tuple[Any, ...]:
    return inputs_of(NAME, [2] * dist.get_world_size(), seed)[dist.get_rank()]


def _errors(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes]


# Before the first step


def distribute_differently(kind: str) -> None:
    odd = dist.get_rank() == 2
    topology = Topology(2, 2)
    options: dict[str, Any] = {}
    name, towers = NAME, None
    if kind == "towers":
        towers = 4 if odd else 2
    elif kind == "topology":
        topology = Topology(4, 1) if odd else topology
    elif kind == "world size, one rank":
        topology = Topology(3, 1) if odd else topology
    elif kind == "world size":
        topology = Topology(3, 1)
    elif kind == "model":
        name = "learnt weights" if odd else name
    elif kind == "options":
        options["find_unused_parameters"] = odd
    model = build(name)
    if kind == "shape" and odd:
        model.top = nn.Linear(44, 3)
    if kind == "frozen":
        model.top.bias.requires_grad_(not odd)
    dmt_compile.towerize(model, topology, towers=towers).distribute(**options)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("towers", "plan.towers"),
        ("topology", "plan.topology.hosts is 2 on rank 0 and 4 on rank 2"),
        ("world size, one rank", "plan.topology.hosts is 2 on rank 0 and 3 on rank 2"),
        ("world size", "the process group has 4 ranks, the program was compiled for 3 hosts x 1 ranks = 3"),
        ("model", "ranks 0 and 2 were given different programs"),
        ("shape", "dense parameters.top.weight[0][0] is 2 on rank 0 and 3 on rank 2"),
        ("frozen", "dense parameters.top.bias[2] is true on rank 0 and false on rank 2"),
        ("options", "options.find_unused_parameters is false on rank 0 and true on rank 2"),
    ],
)
def test_different_programs_are_named_on_all_ranks(ranks: Ranks, kind: str, expected: str) -> None:
    for outcome in ranks.outcomes(4, distribute_differently, kind):
        assert outcome.error == "DistributedError", outcome.trace
        assert expected in outcome.message


def same_plan_made_differently() -> None:
    model = build(NAME)
    plan = dmt_compile.towerize(model, Topology(2, 1)).plan
    if dist.get_rank() == 1:
        plan = dmt_compile.TowerPlan(plan.topology, plan.towers, "read from a file")
    dmt_compile.towerize(model, Topology(2, 1), towers=plan).distribute().close()


def test_how_a_plan_was_made_does_not_matter(ranks: Ranks) -> None:
    ranks(2, same_plan_made_differently)


def outside_the_group() -> None:
    group = dist.new_group([0])
    program = dmt_compile.towerize(build(NAME), Topology(1, 1))
    module = program.distribute(group)
    module.close()


def test_only_members_distribute(ranks: Ranks) -> None:
    inside, outside = ranks.outcomes(2, outside_the_group)
    assert inside.error == "", inside.trace
    assert "rank 1 is no member of the process group" in outside.message


def test_without_a_process_group() -> None:
    with pytest.raises(DistributedError, match=r"init_process_group.*program\.simulate"):
        dmt_compile.towerize(build(NAME), Topology(1, 1)).distribute()


def test_a_backend_for_another_device() -> None:
    refuse_device("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
    refuse_device("cpu:gloo", torch.device("cpu"))
    with pytest.raises(DistributedError, match=r"cuda:nccl.* parameters are on cpu: move the model to cuda"):
        refuse_device("cuda:nccl", torch.device("cpu"))


# A batch that one rank cannot use


def _bad(kind: str) -> tuple[Any, ...]:
    first, second = _good()
    if kind == "feature":
        return first, KeyedJaggedTensor(keys=["z"], values=torch.tensor([1]), lengths=torch.tensor([1, 0]), weights=torch.ones(1))
    if kind == "type":
        return first, torch.zeros(2)
    if kind == "range":
        return (_changed(first, first.values() + 100), second)
    if kind == "negative":
        return (_changed(first, first.values() - 100), second)
    if kind == "lengths":
        return (_changed(first, first.values()[:-1]), second)
    if kind == "batch size":
        return first, inputs_of(NAME, [3] * 8)[0][1]
    assert kind == "weights"
    weights = second.weights().double()
    return first, KeyedJaggedTensor(keys=second.keys(), values=second.values(), lengths=second.lengths(), weights=weights)


def _changed(jagged: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    weights = jagged.weights()[: values.numel()]
    return KeyedJaggedTensor(keys=jagged.keys(), values=values, lengths=jagged.lengths(), weights=weights)


def one_bad_batch(kinds: list[str], bad: int) -> list[tuple[str, str]]:
    module = _module()
    good = module(*_good())
    found = []
    for kind in kinds:
        try:
            module(*(_bad(kind) if dist.get_rank() == bad else _good()))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        # The step after it is as good as ever, gradients included.
        module.zero_grad()
        again = module(*_good())
        objective(again).backward()
        assert torch.equal(again["scores"], good["scores"])
    assert all(p.grad is not None for p in module.dense_parameters())
    module.close()
    return found


def test_a_bad_batch_stops_the_step_and_not_the_module(ranks: Ranks) -> None:
    expected = {
        "feature": "the batch has no feature",
        "type": "must be a torchrec KeyedJaggedTensor",
        "range": "outside its table of 12 rows",
        "negative": "has id -",
        "lengths": "add up to",
        "batch size": "different batch sizes",
        "weights": "has weights of torch.float64, the tables they weigh are torch.float32",
    }
    for bad in (0, 3):
        for rank, found in enumerate(ranks(4, one_bad_batch, list(expected), bad)):
            for (error, message), text in zip(found, expected.values(), strict=True):
                assert error == ("InputError" if rank == bad else "DistributedError"), (rank, message)
                assert (text if rank == bad else f"rank {bad} could not use its batch") in message


# Failures in the user's own code


class HistoryFirst(nn.Module):
    """Two rounds of exchanges: that of the fields begins while the rows of a history of any length are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.users, self.top = nn.Embedding(30, 4), nn.Embedding(20, 4), nn.Linear(8, 1)

    def forward(self, history: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        rows = self.items(history)
        mine = self.users(user)
        weights = torch.softmax((rows * mine.unsqueeze(1)).sum(-1), dim=1)
        return self.top(torch.cat([mine, (weights.unsqueeze(-1) * rows).sum(1)], dim=1))


def bad_ids_in_a_round(where: str) -> list[str]:
    def batch(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, 30, (3, 5), generator=generator), torch.randint(0, 20, (3,), generator=generator)]

    torch.manual_seed(0)
    program = dmt_compile.towerize(HistoryFirst(), Topology(2, 2), example_inputs=tuple(batch(0)))
    assert len(program.lookups.rounds) == 2
    module = program.distribute()
    module(*batch(1)).mean().backward()
    outcomes = []
    for step in range(2):
        bad = batch(2)
        if dist.get_rank() == 1 and where != "nowhere":
            bad[where == "fields"] += 100
        try:
            module(*bad).mean().backward()
            outcomes.append("fine")
        except (InputError, DistributedError) as error:
            outcomes.append(str(error))
        module(*batch(3 + step)).mean().backward()
    module.close()
    return outcomes


@pytest.mark.parametrize("where", ["fields", "history"])
def test_bad_ids_of_any_round_stop_the_step_and_not_the_module(ranks: Ranks, where: str) -> None:
    found = ranks(4, bad_ids_in_a_round, where)
    assert all(len(outcomes) == 2 and "fine" not in outcomes for outcomes in found)
    assert all(("user" if where == "fields" else "history") in outcome for outcome in found[1])
    assert all("rank 1" in outcome for rank in (0, 2, 3) for outcome in found[rank])


class Fragile(nn.Module):
    """Fails where it is told to, before or after its lookups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = Trip()
        self.ebc = models.plain_collection()
        self.after = Trip()
        self.top = nn.Linear(40, 1)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        dense = self.before(dense)
        return self.after(self.top(self.ebc(sparse).values() * dense.sum()))


class Trip(nn.Module):
    """Branches on a tensor, and is therefore kept whole."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.isfinite().all()) and self.fails:
            raise ArithmeticError("spam")
        return x


def user_code_fails(where: str, bad: int, train: bool) -> list[str]:
    dense, sparse = models.torchrec_inputs(2, dist.get_rank())
    module = dmt_compile.towerize(Fragile(), Topology(2, 2)).distribute()
    objective(module(dense, sparse)).backward()
    module.get_submodule(where).fails = dist.get_rank() == bad
    found = []
    for _ in range(2):
        try:
            with torch.set_grad_enabled(train):
                output = module(dense, sparse)
            if train:
                objective(output).backward()
            found.append("")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        module.get_submodule(where).fails = False
    return found


def test_user_code_fails_before_the_exchange(ranks: Ranks) -> None:
    for rank, (first, second) in enumerate(ranks(4, user_code_fails, "before", 1, True)):
        assert first.startswith("ArithmeticError: spam" if rank == 1 else "DistributedError: rank 1 could not use its batch")
        assert second == ""


@pytest.mark.parametrize("train", [True, False])
def test_user_code_fails_after_the_exchange(ranks: Ranks, train: bool) -> None:
    """The failed rank's neighbours see its connections close; whoever waits for those is ended by the timeout at the latest."""
    for rank, (first, second) in enumerate(ranks(4, user_code_fails, "after", 1, train, collective=WAIT)):
        if rank == 1:
            assert first.startswith("ArithmeticError: spam")
            assert "cannot run any more" in second
            assert "spam" in second
        else:
            assert first != "" or not train
            assert second != ""


def owner_fails(bad: int) -> str:
    module = _module(check_ids=False)
    first, second = _good()
    if dist.get_rank() == bad:
        first = _changed(first, first.values() + 100)
    try:
        objective(module(first, second)).backward()
    except Exception as error:
        return type(error).__name__
    return ""


def test_an_unchecked_id_fails_on_its_owner(ranks: Ranks) -> None:
    assert all(error != "" for error in ranks(4, owner_fails, 1, collective=WAIT))


# A closed module, a copied one


def closed() -> tuple[str, list[str], int, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    module = _module()
    objective(module(*_good())).backward()
    messages = []
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError) as refused:
            duplicate(module)
        messages.append(str(refused.value))
    module.close()
    module.close()
    with pytest.raises(DistributedError) as caught:
        module(*_good())
    module.train()
    assert module.state_dict()
    return str(caught.value), messages, before, len(dist.distributed_c10d._world.pg_map)


def test_closed_and_copied_modules_explain_themselves(ranks: Ranks) -> None:
    for message, copies, before, after in ranks(2, closed):
        assert "it was closed; distribute the program again" in message
        assert all("save state_dict()" in copy for copy in copies)
        assert before == after, "process groups were left behind"


# A process that dies


def dies(bad: int) -> None:
    module = _module()
    objective(module(*_good())).backward()
    output = module(*_good(1))
    if dist.get_rank() == bad:
        os._exit(3)
    objective(output).backward()


def test_a_dead_process_ends_the_others() -> None:
    """In processes of its own: the pool would not survive it."""
    own = Ranks(4)
    try:
        with pytest.raises(RankError) as caught:
            own(4, dies, 2, patience=60, collective=WAIT)
    finally:
        own.close()
    message = str(caught.value)
    assert "rank 2, exit code 3, no result" in message
    assert message.count("Error: ") >= 3, message


def test_input_errors_are_value_errors() -> None:
    assert issubclass(InputError, ValueError)
