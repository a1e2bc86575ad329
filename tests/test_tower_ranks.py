"""Tower modules on real ranks: outputs, gradients, training and state dicts against the same tower model on one device."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, copied, gradients_of, objective, optimizer
from ranks import Ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from tower_models import CASES, UserTower, program

import dmt_compile
from dmt_compile import DistributedError, Topology
from dmt_compile.graphs import clone_with_parameters
from dmt_compile.runtime.rank_module import RankModule
from dmt_compile.verify.compare import furthest

pytestmark = pytest.mark.multi_rank

STEPS = 2
Grid = tuple[int, int, int]


def _sizes(world: int, step: int, empty: bool) -> list[int]:
    return [(rank + step) % 3 + (0 if empty else 1) for rank in range(world)]


def _batches(case: str, sizes: Sequence[int], step: int) -> list[tuple[Any, ...]]:
    return [CASES[case].inputs(size, 100 * step + rank) for rank, size in enumerate(sizes)]


def _optimizer(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    return [optimizer(name, own, tables=False) for own in [list(module.parameters())] if own]


def train_on_ranks(case: str, grid: Grid, tower: str, optimizer_name: str, empty: bool) -> Any:
    """Runs on a rank: outputs and gradients of every step, the tower's own parameters, the names of tables, the full state dict."""
    compiled = program(case, grid, tower)
    module = compiled.distribute()
    trainers = _optimizer(optimizer_name, module)
    steps = []
    for step in range(STEPS):
        module.zero_grad()
        output = module(*_batches(case, _sizes(grid[0] * grid[1], step, empty), step)[dist.get_rank()])
        objective(output).backward()
        steps.append((copied(output), gradients_of(module)))
        for trainer in trainers:
            trainer.step()
    tower_names = {id(p) for p in module.tower_parameters()}
    named = {name: p.detach().clone() for name, p in module.named_parameters()}
    own = [name for name, p in module.named_parameters() if id(p) in tower_names]
    full = module.full_state_dict()
    traffic = module.traffic.across_hosts
    module.close()
    return steps, named, own, full, traffic


def reference_steps(case: str, grid: Grid, tower: str, optimizer_name: str, empty: bool) -> tuple[list[Any], Tensors, list[str]]:
    """The same on one device with the tower model."""
    compiled = program(case, grid, tower)
    model = clone_with_parameters(compiled.stages["model"].root)
    trainers = _optimizer(optimizer_name, model)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        sizes = _sizes(grid[0] * grid[1], step, empty)
        outputs = [model(*given) if size else None for given, size in zip(_batches(case, sizes, step), sizes, strict=True)]
        (torch.stack([objective(output) for output in outputs if output is not None]).sum() / len(sizes)).backward()
        steps.append(([None if output is None else copied(output) for output in outputs], gradients_of(model)))
        for trainer in trainers:
            trainer.step()
    return steps, dict(model.state_dict()), [table.parameter for table in compiled.lookups.tables]


def _merged(parts: list[Tensors], towers: list[int], tables: list[str]) -> Tensors:
    """One model's gradients: a table's from its owner, a tower's the same bits on all its ranks and nowhere else."""
    result: Tensors = {}
    holders: dict[str, set[int]] = {}
    for tower, part in zip(towers, parts, strict=True):
        for name, value in part.items():
            holders.setdefault(name, set()).add(tower)
            if name in result:
                assert name not in tables, name
                assert torch.equal(result[name], value), f"{name} differs between ranks"
            result[name] = value
    for name, found in holders.items():
        if name.startswith("dmt_towers."):
            assert found == {int(name.split(".")[1])}, (name, found)
    return result


def _weights(state: Tensors) -> Tensors:
    return {name: value for name, value in state.items() if value.is_floating_point()}


RUNS = [
    ("dot", (4, 2, 4), "both", "Adam", False),
    ("dot", (2, 3, 2), "together", "SGD", True),
    ("dot", (2, 2, 2), "list", "Adam", False),
    ("dot", (2, 2, 2), "some", "SGD", False),
    ("by mode", (2, 2, 2), "each", "SGD", False),
    ("beside", (4, 2, 2), "together", "SGD", True),
    ("torchrec", (3, 1, 3), "both", "SGD", False),
    ("torchrec dcn", (2, 2, 2), "expanded", "SGD", False),
]


@pytest.mark.parametrize(("case", "grid", "tower", "optimizer_name", "empty"), RUNS)
def test_steps_equal_one_device(ranks: Ranks, case: str, grid: Grid, tower: str, optimizer_name: str, empty: bool) -> None:
    world = grid[0] * grid[1]
    found = ranks(world, train_on_ranks, case, grid, tower, optimizer_name, empty)
    expected, state, tables = reference_steps(case, grid, tower, optimizer_name, empty)
    towers = [rank * grid[2] // world for rank in range(world)]
    initial = program(case, grid, tower).state_dict()
    for step in range(STEPS):
        for rank in range(world):
            mine, its = found[rank][0][step][0], expected[step][0][rank]
            if its is None:
                assert all(len(value) == 0 for value in mine.values())
                continue
            assert mine.keys() == its.keys()
            for where, value in mine.items():
                torch.testing.assert_close(value, its[where], rtol=1e-4, atol=1e-5)
        on_ranks = _merged([one[0][step][1] for one in found], towers, tables)
        assert on_ranks.keys() == expected[step][1].keys()
        if step == 0:
            worst, name = furthest(on_ranks, expected[step][1])
            assert worst <= 1, (name, worst)
    for _, named, own, full, _ in found:
        assert list(full) == list(state)
        for name, value in full.items():
            assert torch.equal(value, found[0][3][name]), f"{name} differs between ranks"
        worst, name = furthest(_weights(full), _weights(state))
        assert worst <= 4 * STEPS, (name, worst)
        assert all(torch.equal(value, full[name]) for name, value in named.items())
        assert all(name.startswith("dmt_towers.") for name in own)
    assert furthest(_weights(initial), _weights(state))[0] > 500 * STEPS
    trained = {name.split(".")[1] for name in _weights(state) if name.startswith("dmt_towers.")}
    assert {name.split(".")[1] for one in found for name in one[2]} == trained


class Whole(nn.Module):
    """All values are whole numbers, so that sums over samples do not depend on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(4))
        self.top = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], dim=1))


def _whole_program() -> dmt_compile.TowerProgram:
    from dmt_compile.towers.modules import DLRMTower

    example = (torch.arange(20).reshape(5, 4) % 9,)
    compiled = dmt_compile.towerize(Whole(), Topology(2, 3), towers=2, example_inputs=example, tower_module=DLRMTower(1, 1, 4))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=draw))
    return compiled


def _whole_inputs(rank: int) -> torch.Tensor:
    return torch.randint(0, 9, (1 + rank % 3, 4), generator=torch.Generator().manual_seed(rank))


def whole_on_ranks() -> Tensors:
    """Runs on a rank: gradients of the sum of the outputs."""
    module = _whole_program().distribute()
    module(_whole_inputs(dist.get_rank())).sum().backward()
    found = gradients_of(module)
    module.close()
    return found


def test_gradients_of_whole_numbers_have_the_same_bits(ranks: Ranks) -> None:
    """Sums over six ranks, divided once by six: a mean of means over a tower's three ranks would round twice."""
    found = ranks(6, whole_on_ranks)
    compiled = _whole_program()
    model = clone_with_parameters(compiled.stages["model"].root)
    torch.stack([model(_whole_inputs(rank)).sum() for rank in range(6)]).sum().backward()
    mine = _merged(found, [0, 0, 0, 1, 1, 1], [table.parameter for table in compiled.lookups.tables])
    towers = {name: p.grad for name, p in model.named_parameters() if name.startswith("dmt_towers.") and p.grad is not None}
    assert len(towers) == 8
    for name, gradient in towers.items():
        assert bool((gradient == gradient.round()).all()) and bool(gradient.any())
        assert torch.equal(mine[name], gradient / 6), name


def bytes_on_ranks(grid: Grid, tower: str | None) -> int:
    """Runs on a rank: what one forward and backward sends across hosts."""
    case = CASES["dot"]
    if tower is None:
        hosts, local, towers = grid
        flat = dmt_compile.towerize(case.build(), Topology(hosts, local), towers=towers, example_inputs=case.inputs(6, 7))
    else:
        flat = program("dot", grid, tower)
    module = flat.distribute()
    objective(module(*case.inputs(4, dist.get_rank()))).backward()
    sent = module.traffic.across_hosts
    module.close()
    return sent


def test_only_what_the_modules_make_crosses_hosts(ranks: Ranks) -> None:
    flat, halved = sum(ranks(4, bytes_on_ranks, (2, 2, 2), None)), sum(ranks(4, bytes_on_ranks, (2, 2, 2), "each"))
    # Of 40 columns 20 are left: 4 ranks send 4 samples to their one peer, half of the columns each, 4 bytes a value, and back.
    assert flat - halved == 20 // 2 * 4 * 4 * 4 * 2
    kept = sum(ranks(4, bytes_on_ranks, (2, 2, 2), "pass"))
    assert kept == flat


def clip_on_ranks() -> tuple[float, Tensors, Tensors]:
    """Runs on a rank: the norm, and gradients before and after."""
    module = program("dot", (4, 1, 2), "both").distribute()
    objective(module(*CASES["dot"].inputs(3, dist.get_rank()))).backward()
    before = gradients_of(module)
    norm = float(module.clip_grad_norm_(0.01))
    after = gradients_of(module)
    module.close()
    return norm, before, after


def test_a_towers_gradients_count_once_in_the_norm(ranks: Ranks) -> None:
    found = ranks(4, clip_on_ranks)
    tables = [table.parameter for table in program("dot", (4, 1, 2), "both").lookups.tables]
    whole = _merged([before for _, before, _ in found], [0, 0, 1, 1], tables)
    assert any(name.startswith("dmt_towers.1") for name in whole)
    expected = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in whole.values()])))
    for norm, before, after in found:
        assert norm == pytest.approx(expected, rel=1e-5)
        for name, value in before.items():
            torch.testing.assert_close(after[name], value * (0.01 / expected), rtol=1e-4, atol=1e-8)


def accumulate_on_ranks(trainable: str) -> tuple[Tensors, str]:
    """Runs on a rank: gradients of two batches, the first without averaging; and what a second backward raises."""
    compiled = program("dot", (2, 2, 2), "both")
    if trainable == "towers":
        for name, parameter in compiled.named_parameters():
            parameter.requires_grad_(name.startswith(("dmt_towers", "tables")))
    module = compiled.distribute()
    rank = dist.get_rank()
    with module.no_sync():
        objective(module(*CASES["dot"].inputs(2, rank))).backward()
    loss = objective(module(*CASES["dot"].inputs(3, 50 + rank)))
    loss.backward(retain_graph=True)
    found = gradients_of(module)
    message = ""
    try:
        loss.backward()
    except DistributedError as error:
        message = str(error)
    module.close()
    return found, message


@pytest.mark.parametrize("trainable", ["everything", "towers"])
def test_accumulated_gradients(ranks: Ranks, trainable: str) -> None:
    """Also where towers' modules are the only dense layers that are trained."""
    found = ranks(4, accumulate_on_ranks, trainable)
    compiled = program("dot", (2, 2, 2), "both")
    model = clone_with_parameters(compiled.stages["model"].root)
    losses = [
        objective(model(*CASES["dot"].inputs(2, rank))) + objective(model(*CASES["dot"].inputs(3, 50 + rank))) for rank in range(4)
    ]
    (torch.stack(losses).sum() / 4).backward()
    expected = gradients_of(model)
    if trainable == "towers":
        expected = {name: value for name, value in expected.items() if name.startswith(("dmt_towers", "tables"))}
    mine = _merged([part for part, _ in found], [0, 0, 1, 1], [table.parameter for table in compiled.lookups.tables])
    assert mine.keys() == expected.keys()
    worst, name = furthest(mine, expected)
    assert worst <= 1, (name, worst)
    assert all("a second backward" in message for _, message in found)


class Switched(UserTower):
    """Does not use all of its parameters in every step."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.spare = nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def unused_on_ranks() -> list[list[str]]:
    """Runs on a rank: after each of two steps, which parameters of the tower have a gradient."""
    case = CASES["dot"]
    compiled = dmt_compile.towerize(case.build(), Topology(2, 2), example_inputs=case.inputs(6, 7), tower_module=Switched)
    module = compiled.distribute(find_unused_parameters=True)
    found = []
    for step in range(2):
        module.zero_grad()
        objective(module(*case.inputs(2, 10 * step + dist.get_rank()))).backward()
        found.append(sorted(name for name, p in module.named_parameters() if name.startswith("dmt_towers") and p.grad is not None))
    module.close()
    return found


def test_parameters_that_a_tower_does_not_use(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks(4, unused_on_ranks)):
        used = [f"dmt_towers.{rank // 2}.{name}" for name in ("mix.bias", "mix.weight", "norm.bias", "norm.weight")]
        assert steps == [used, used]


def evaluate_on_ranks() -> Any:
    """Runs on a rank: the outputs in evaluation mode, between steps of training, and the state dict's keys."""
    module = program("by mode", (2, 2, 2), "own").distribute()
    rank = dist.get_rank()
    objective(module(*CASES["by mode"].inputs(2, rank))).backward()
    module.eval()
    with torch.no_grad():
        output = module(*CASES["by mode"].inputs(3, rank))
    module.train()
    module.zero_grad()
    objective(module(*CASES["by mode"].inputs(2, rank))).backward()
    keys = list(module.state_dict())
    module.close()
    return output, keys


def test_evaluation_between_steps(ranks: Ranks) -> None:
    found = ranks(4, evaluate_on_ranks)
    compiled = program("by mode", (2, 2, 2), "own").eval()
    for rank, (output, keys) in enumerate(found):
        torch.testing.assert_close(output, compiled(*CASES["by mode"].inputs(3, rank)), rtol=1e-4, atol=1e-5)
        towers = {key.split(".")[1] for key in keys if key.startswith("dmt_towers.")}
        assert towers == {str(rank // 2), f"features_{rank // 2}"}
        assert f"dmt_towers.{rank // 2}.shift" in keys


def start_on_ranks() -> Tensors:
    """Runs on a rank: the full state of a program whose towers were made with other values on every rank."""
    compiled = program("dot", (2, 2, 2), "own")
    with torch.no_grad():
        for name, tensor in (*compiled.named_parameters(), *compiled.named_buffers()):
            if name.startswith("dmt_towers") and tensor.is_floating_point():
                tensor.fill_(dist.get_rank())
    module = compiled.distribute()
    held = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    full = module.full_state_dict()
    module.close()
    return {**full, **{f"held {name}": tensor for name, tensor in held.items()}}


def test_towers_start_with_the_values_of_rank_0(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(4, start_on_ranks)):
        own = {name.split(".")[1] for name in found if name.startswith("held dmt_towers.")}
        assert own == {str(rank // 2), f"features_{rank // 2}"}
        for name, value in found.items():
            if "dmt_towers." in name and value.is_floating_point():
                assert bool((value == 0).all()), name


def _floating(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]


def save_on_ranks(grid: Grid, folder: str) -> Tensors:
    """Runs on a rank: change everything, save a checkpoint; the full state dict."""
    import torch.distributed.checkpoint as dcp

    module = program("dot", grid, "own").distribute()
    with torch.no_grad():
        for tensor in _floating(module):
            tensor += 1
    dcp.save(module.state_dict(), checkpoint_id=folder)
    full = module.full_state_dict()
    module.close()
    return full


def load_on_ranks(grid: Grid, folder: str, full: Tensors) -> list[Tensors]:
    """Runs on a rank: what the module holds after each of two ways to load."""
    import torch.distributed.checkpoint as dcp

    module: RankModule = program("dot", grid, "own").distribute()
    module.load_state_dict(full)
    found = [module.full_state_dict()]
    with torch.no_grad():
        for tensor in _floating(module):
            tensor.zero_()
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state)
    found.append(module.full_state_dict())
    module.close()
    return found


def test_checkpoints_on_another_grid_of_as_many_towers(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        full = ranks(4, save_on_ranks, (2, 2, 2), folder)[0]
        assert list(full) == list(program("dot", (2, 2, 2), "own").state_dict())
        for grid in ((2, 1, 2), (4, 2, 2)):
            for loaded in ranks(grid[0] * grid[1], load_on_ranks, grid, folder, full):
                for state in loaded:
                    assert list(state) == list(full)
                    assert all(torch.equal(state[key], full[key]) for key in full)
    # One device takes the same state.
    here = program("dot", (2, 2, 2), "own")
    here.load_state_dict(full)
    assert all(torch.equal(value, full[key]) for key, value in here.state_dict().items())


def optimizer_on_ranks(grid: Grid, folder: str, load: bool) -> Tensors:
    """Runs on a rank: what an optimizer keeps for the tower's module, after a step or out of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    module = program("dot", grid, "both").distribute()
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    if load:
        state = module.optimizer_state_dict(adam)
        dcp.load(state, checkpoint_id=folder)
        module.load_optimizer_state_dict(adam, state)
    else:
        objective(module(*CASES["dot"].inputs(3, dist.get_rank()))).backward()
        adam.step()
        dcp.save(module.optimizer_state_dict(adam), checkpoint_id=folder)
    names = {id(p): name for name, p in module.named_parameters()}
    own = {id(p) for p in module.tower_parameters()}
    kept = {
        f"{names[id(p)]} {key}": value.clone() for p, state in adam.state.items() if id(p) in own for key, value in state.items()
    }
    module.close()
    return kept


def test_optimizer_state_of_a_tower_on_another_grid(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(4, optimizer_on_ranks, (2, 2, 2), folder, False)
        loaded = ranks(2, optimizer_on_ranks, (2, 1, 2), folder, True)
    for tower in range(2):
        mine, its = loaded[tower], saved[2 * tower]
        assert mine.keys() == its.keys() and len(its) == 4 * 3
        assert all(torch.equal(value, its[key]) for key, value in mine.items())
        assert all(torch.equal(value, its[key]) for key, value in saved[2 * tower + 1].items())


def materialise_on_ranks(where: str) -> Tensors:
    """Runs on a rank: the full state of a model on the meta device, after a backward."""
    model = models.torchrec_model("DLRM", device="meta")
    module = dmt_compile.towerize(model, Topology(2, 2), tower_module=_both(where)).distribute(device="cpu")
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    objective(module(*CASES["torchrec"].inputs(2, dist.get_rank()))).backward()
    gradients = [p.grad for p in module.tower_parameters()]
    assert len(gradients) == 4 and all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    full = module.full_state_dict()
    module.close()
    return full


def _both(where: str) -> Any:
    from dmt_compile.towers.modules import DLRMTower

    def make(features: int, width: int) -> nn.Module:
        with torch.device(where):
            return DLRMTower(c=1, p=1, dim=width)(features, width)

    return make


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_model_without_values(ranks: Ranks, where: str) -> None:
    found = ranks(4, materialise_on_ranks, where)
    for full in found:
        assert all(torch.equal(value, found[0][name]) for name, value in full.items())
    assert sum(name.startswith("dmt_towers.") and value.is_floating_point() for name, value in found[0].items()) == 8


class Failing(UserTower):
    """Raises on one rank, in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and self.training:
            raise ArithmeticError("spam")
        return super().forward(x)


def fail_on_ranks() -> list[str]:
    """Runs on a rank: what two steps raise where the tower's module fails on rank 1."""
    case = CASES["dot"]
    compiled = dmt_compile.towerize(case.build(), Topology(2, 2), example_inputs=case.inputs(6, 7), tower_module=Failing)
    module = compiled.distribute()
    messages = []
    for _ in range(2):
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            objective(module(*case.inputs(2, dist.get_rank()))).backward()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def test_a_module_that_fails_on_one_rank_ends_the_step_on_all(ranks: Ranks) -> None:
    """Ranks 1 and 3 are peers; 0 and 2 end their forward without them, and learn of it in backward."""
    found = ranks(4, fail_on_ranks)
    # A rank whose backward failed still waits for others: its process ends, as a training job's would.
    ranks.close()
    for rank, (first, second) in enumerate(found):
        if rank == 1:
            assert first == "ArithmeticError: spam"
        elif rank == 3:
            assert first.startswith("DistributedError: another rank failed")
        else:
            assert first.startswith(("RuntimeError", "DistributedError")), first
        if rank % 2:
            assert second.startswith("DistributedError: this module cannot run any more"), (rank, second)


def checkpointed_on_ranks() -> list[Tensors]:
    """Runs on a rank: gradients of two steps, whose activations are computed once more in backward."""
    module = program("dot", (2, 2, 2), "both").distribute()
    found = []
    for step in range(2):
        module.zero_grad()
        given = CASES["dot"].inputs(2, 10 * step + dist.get_rank())
        objective(checkpoint(functools.partial(module, *given), use_reentrant=False)).backward()
        found.append(gradients_of(module))
    module.close()
    return found


def test_checkpointed_activations(ranks: Ranks) -> None:
    found = ranks(4, checkpointed_on_ranks)
    compiled = program("dot", (2, 2, 2), "both")
    tables = [table.parameter for table in compiled.lookups.tables]
    for step in range(2):
        model = clone_with_parameters(compiled.stages["model"].root)
        losses = [objective(model(*CASES["dot"].inputs(2, 10 * step + rank))) for rank in range(4)]
        (torch.stack(losses).sum() / 4).backward()
        worst, name = furthest(_merged([own[step] for own in found], [0, 0, 1, 1], tables), gradients_of(model))
        assert worst <= 1, (step, name, worst)


def disagree_on_ranks() -> str:
    """Runs on a rank: what is raised where rank 1 was given other tower modules."""
    with pytest.raises(DistributedError) as caught:
        program("dot", (2, 1, 2), "each" if dist.get_rank() == 0 else "pass").distribute()
    return str(caught.value)


def test_ranks_with_other_modules_are_refused(ranks: Ranks) -> None:
    for message in ranks(2, disagree_on_ranks):
        assert "ranks 0 and 1 were given different programs: towers" in message
