"""Training on real ranks: optimizers, parameters, state dicts and checkpoints, against the flat model in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, build, inputs_of, objective, optimizer, tables_of
from ranks import Ranks
from torch import nn

import dmt_compile
from dmt_compile.graphs import clone_with_parameters
from dmt_compile.runtime.rank_module import RankModule
from dmt_compile.verify.compare import furthest

pytestmark = pytest.mark.multi_rank

STEPS = 4
OPTIMIZERS = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad"]


def _batches(name: str, world: int) -> list[list[tuple[Any, ...]]]:
    return [inputs_of(name, [2 + (rank + step) % 3 for rank in range(world)], seed=step) for step in range(STEPS)]


def _optimizers(name: str, tables: list[nn.Parameter], dense: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [optimizer(name, part, tables=part is tables) for part in (tables, dense) if part]


def _distributed(name: str, grid: tuple[int, int, int], **options: Any) -> RankModule:
    hosts, local, towers = grid
    return dmt_compile.towerize(build(name), dmt_compile.Topology(hosts, local), towers=towers).distribute(**options)


def train_on_ranks(name: str, grid: tuple[int, int, int], optimizer_name: str) -> tuple[Tensors, Tensors, list[str]]:
    """Runs on a rank: the full state dict, the rank's own parameters, and the names of its tables."""
    module = _distributed(name, grid)
    trainers = _optimizers(optimizer_name, list(module.table_parameters()), list(module.dense_parameters()))
    for batch in _batches(name, grid[0] * grid[1]):
        module.zero_grad()
        objective(module(*batch[dist.get_rank()])).backward()
        for trainer in trainers:
            trainer.step()
    tables = {id(p) for p in module.table_parameters()}
    own = {n: p.detach().clone() for n, p in module.named_parameters()}
    full = module.full_state_dict()
    module.close()
    return full, own, [n for n, p in module.named_parameters() if id(p) in tables]


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize(("name", "grid"), [("two collections", (3, 2, 3)), ("DLRM_DCN train", (2, 3, 2))])
def test_steps_equal_one_process(ranks: Ranks, name: str, optimizer_name: str, grid: tuple[int, int, int]) -> None:
    found = ranks(grid[0] * grid[1], train_on_ranks, name, grid, optimizer_name)
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tables = tables_of(model)
    named = dict(model.named_parameters())
    trainers = _optimizers(
        optimizer_name, [p for n, p in named.items() if n in tables], [p for n, p in named.items() if n not in tables]
    )
    for batch in _batches(name, grid[0] * grid[1]):
        model.zero_grad()
        (torch.stack([objective(model(*given)) for given in batch]).sum() / len(batch)).backward()
        for trainer in trainers:
            trainer.step()
    expected = model.state_dict()
    # Gradients are added up in another order; every step carries the difference on.
    for full, _, _ in found:
        assert list(full) == list(expected)
        worst, parameter = furthest(full, expected)
        assert worst <= STEPS, (parameter, worst)
    assert furthest(before, expected)[0] > 1000 * STEPS
    _check_ownership(found, set(named), tables)


def _check_ownership(found: list[Any], names: set[str], tables: set[str]) -> None:
    """Every table is on one rank, everything else the same bits on all."""
    owned = [table for _, _, own_tables in found for table in own_tables]
    assert sorted(owned) == sorted(tables)
    for full, own, own_tables in found:
        assert set(own) == (names - tables) | set(own_tables)
        for name, value in own.items():
            assert torch.equal(value, full[name])
        for name in names:
            assert torch.equal(full[name], found[0][0][name])


def save_on_ranks(name: str, grid: tuple[int, int, int], folder: str) -> Tensors:
    """Runs on a rank: change all parameters, save a checkpoint; the full state dict."""
    import torch.distributed.checkpoint as dcp

    module = _distributed(name, grid)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    dcp.save(module.state_dict(), checkpoint_id=folder)
    result = module.full_state_dict()
    module.close()
    return result


def load_on_ranks(name: str, grid: tuple[int, int, int], folder: str, full: Tensors) -> list[Tensors]:
    """Runs on a rank: what the module holds after each of two ways to load."""
    import torch.distributed.checkpoint as dcp

    found = []
    module = _distributed(name, grid)
    keys = list(full)
    module.load_state_dict(full)
    assert list(full) == keys, "the caller's dict was changed"
    found.append(module.full_state_dict())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state)
    found.append(module.full_state_dict())
    module.close()
    return found


def refuse_on_ranks(name: str, full: Tensors) -> list[str]:
    """Runs on a rank: the messages of everything that must not load."""
    module = _distributed(name, (2, 1, 2))
    (table, *_) = [key for key in module.state_dict() if "embedding_bags" in key]
    messages = []
    for wrong in (
        {**full, "spam": torch.zeros(1)},
        {key: value for key, value in full.items() if key != "top.bias"},
        {key: value for key, value in full.items() if key != table},
        {**full, table: torch.zeros(1, 1)},
    ):
        with pytest.raises(RuntimeError) as caught:
            module.load_state_dict(wrong)
        messages.append(str(caught.value))
    assert table in messages[2]
    assert table in messages[3]
    module.close()
    return messages


def test_wrong_keys_are_refused(ranks: Ranks) -> None:
    full = build("two collections").state_dict()
    for messages in ranks(2, refuse_on_ranks, "two collections", full):
        for message, expected in zip(messages, ("spam", "top.bias", "Missing key", "size mismatch"), strict=True):
            assert expected in message


def test_save_under_one_plan_load_under_another(ranks: Ranks) -> None:
    import torch.distributed.checkpoint as dcp

    name = "two collections"
    with tempfile.TemporaryDirectory() as folder:
        full = ranks(8, save_on_ranks, name, (4, 2, 2), folder)[0]
        assert list(full) == list(build(name).state_dict())
        for grid in ((2, 2, 2), (3, 1, 3)):
            for loaded in ranks(grid[0] * grid[1], load_on_ranks, name, grid, folder, full):
                for state in loaded:
                    assert list(state) == list(full)
                    assert all(torch.equal(state[key], full[key]) for key in full)
        flat = build(name)
        flat.load_state_dict(full)
        read = {key: torch.zeros_like(value) for key, value in full.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(read[key], full[key]) for key in full)
    assert all(torch.equal(p, build(name).get_parameter(n) + 1) for n, p in flat.named_parameters())


def test_flat_state_dict_from_the_program_itself(ranks: Ranks) -> None:
    """The user's model shares its tensors with the program, and the ranks with it: nothing is copied."""
    assert all(ranks(2, shared_on_ranks))


def shared_on_ranks() -> bool:
    model = build("two collections")
    module = dmt_compile.towerize(model, dmt_compile.Topology(2, 1)).distribute()
    shared = all(p is model.get_parameter(n) for n, p in module.named_parameters())
    untouched = clone_with_parameters(build("two collections")).state_dict().keys() == model.state_dict().keys()
    module.close()
    return shared and untouched
