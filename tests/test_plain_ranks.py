"""Plain PyTorch models on real ranks: the lock-step cluster's bits, training as on one process, sparse gradients, state dicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, by_table, copied, gradients_of, merged, objective
from plain_models import BIG, CASES, Inputs
from ranks import Ranks

from dmt_compile import Topology, TowerProgram, towerize
from dmt_compile.graphs import clone_sharing_tensors, clone_with_parameters
from dmt_compile.runtime.rank_module import RankModule
from dmt_compile.verify.cluster import simulate
from dmt_compile.verify.compare import bits_differ, furthest

pytestmark = pytest.mark.multi_rank

STEPS = 3
RATE = 0.1


def _program(name: str, grid: tuple[int, int, int]) -> TowerProgram:
    hosts, local, towers = grid
    return towerize(CASES[name].build(), Topology(hosts, local), towers=towers, example_inputs=CASES[name].example())


def _batches(name: str, sizes: Sequence[int], step: int) -> list[Inputs]:
    return [CASES[name].batch(size, seed=100 * step + rank) for rank, size in enumerate(sizes)]


def _sizes(world: int) -> list[list[int]]:
    return [[1 + (rank + step) % 3 for rank in range(world)] for step in range(STEPS)]


def train_on_ranks(name: str, grid: tuple[int, int, int], sizes: list[list[int]]) -> Any:
    """Runs on a rank: outputs and gradients of every step, which gradients were sparse, and the full state dict after all."""
    program = _program(name, grid)
    module = program.distribute()
    # A rank may own no table of a model that has nothing else.
    optimizers = [torch.optim.SGD(own, lr=RATE) for own in [list(module.parameters())] if own]
    steps = []
    for step, one in enumerate(sizes):
        module.zero_grad()
        args, kwargs = _batches(name, one, step)[dist.get_rank()]
        output = module(*args, **kwargs)
        objective(output).backward()
        sparse = {n: p.grad.is_sparse for n, p in module.named_parameters() if p.grad is not None}
        steps.append((copied(output), by_table(gradients_of(module), program.lookups, module._context.bases), sparse))
        for optimizer in optimizers:
            optimizer.step()
    full = module.full_state_dict()
    rows = {n: len(p) for n, p in module.named_parameters() if any(p is t for t in module.table_parameters())}
    module.close()
    return steps, full, rows


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("per field", (2, 3, 2)),
        ("one table", (2, 2, 2)),
        ("offsets", (2, 3, 6)),
        ("stacked offsets", (3, 2, 3)),
        ("history", (4, 2, 2)),
        ("mixed", (2, 2, 1)),
        ("renormed", (3, 2, 3)),
        ("shared", (3, 1, 3)),
        ("chained", (2, 2, 2)),
        ("pooled by the model", (2, 2, 2)),
        ("ragged", (2, 3, 2)),
        ("bags of parts", (2, 2, 4)),
        ("fields over time", (2, 3, 2)),
    ],
)
def test_steps_equal_one_process(ranks: Ranks, name: str, grid: tuple[int, int, int]) -> None:
    world = grid[0] * grid[1]
    sizes = _sizes(world)
    found = ranks(world, train_on_ranks, name, grid, sizes)
    flat = CASES[name].build()
    optimizer = torch.optim.SGD(flat.parameters(), lr=RATE)
    program = _program(name, grid)
    lookups, tables = program.lookups, set(program.lookups.table)
    # Every row is on one rank.
    for parameter, held in lookups.shards.items():
        assert sum(rows.get(parameter, 0) for _, _, rows in found) == held[-1].end
    # First step: the same bits as the lock-step cluster, whose table gradients are the ranks' too.
    cluster = clone_with_parameters(program.stages["lowered"].root)
    parts = _batches(name, sizes[0], 0)
    outputs = simulate(program.stages["lowered"], parts, [clone_sharing_tensors(cluster, copy_buffers=True) for _ in parts])
    assert bits_differ([steps[0][0] for steps, *_ in found], [copied(output) for output in outputs]) is None
    torch.stack([objective(output) for output in outputs]).sum().backward()
    here = by_table(gradients_of(cluster), lookups)
    on_ranks = merged([steps[0][1] for steps, *_ in found], tables)
    assert {n for n in here if n in tables} == {n for n in on_ranks if n in tables}
    assert all(torch.equal(here[n], on_ranks[n]) for n in tables if n in here)
    for step, one in enumerate(sizes):
        optimizer.zero_grad()
        terms = [objective(flat(*args, **kwargs)) for args, kwargs in _batches(name, one, step)]
        (torch.stack(terms).sum() / world).backward()
        expected = {n: p.grad for n, p in flat.named_parameters() if p.grad is not None}
        sparse = {n for n, g in expected.items() if g.is_sparse}
        mine: Tensors = merged([steps[step][1] for steps, *_ in found], tables)
        whole = by_table(expected, lookups)
        assert mine.keys() == whole.keys()
        assert {n for steps, *_ in found for n, is_sparse in steps[step][2].items() if is_sparse} == sparse
        if step == 0:
            worst, parameter = furthest(mine, whole)
            assert worst <= 1, (parameter, worst)
        optimizer.step()
    for full, expected_state in ((full, flat.state_dict()) for _, full, _ in found):
        assert list(full) == list(expected_state)
        worst, parameter = furthest(full, expected_state)
        assert worst <= STEPS, (parameter, worst)
        assert any(not torch.equal(full[key], value) for key, value in CASES[name].build().state_dict().items())


def empty_on_ranks(name: str) -> list[Tensors]:
    """Runs on a rank: outputs where the other ranks, then this one, have no samples."""
    module = _program(name, (1, 2, 1)).distribute()
    found = []
    for step, one in enumerate([(3, 0), (0, 3), (0, 0)]):
        args, kwargs = _batches(name, one, step)[dist.get_rank()]
        output = module(*args, **kwargs)
        torch.stack([tensor.sum() for tensor in [output] if tensor.requires_grad]).sum().backward()
        found.append(copied(output))
    module.close()
    return found


@pytest.mark.parametrize(
    "name", ["one table", "offsets", "stacked offsets", "field major", "ragged", "chained", "fields over time"]
)
def test_ranks_without_samples(ranks: Ranks, name: str) -> None:
    found = ranks(2, empty_on_ranks, name)
    for step, one in enumerate([(3, 0), (0, 3), (0, 0)]):
        for rank, (args, kwargs) in enumerate(_batches(name, one, step)):
            expected = copied(CASES[name].build()(*args, **kwargs))
            assert bits_differ(found[rank][step], expected) is None, (one, rank)


def _spoiled(name: str, kind: str) -> Inputs:
    args, kwargs = CASES[name].batch(2)
    first = args[0]
    if kind == "range":
        args = (first + 100, *args[1:])
    elif kind == "negative":
        args = (first - 100, *args[1:])
    elif kind == "floats":
        args = (first.float(), *args[1:])
    elif kind == "count":
        args = (torch.cat([first, first], dim=1),)
    elif kind == "offsets":
        args = (first, args[1].flip(0) + 1, *args[2:])
    elif kind == "key":
        args = ({key: value for key, value in first.items() if key != "history"},)
    return args, kwargs


def bad_on_ranks(cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Runs on a rank: the errors of steps in which rank 1 has a batch that cannot be used; each is followed by a good step."""
    found = []
    modules: dict[str, RankModule] = {}
    for name, kind in cases:
        module = modules.setdefault(name, _program(name, (1, 2, 1)).distribute())
        args, kwargs = _spoiled(name, kind if dist.get_rank() == 1 else "")
        try:
            module(*args, **kwargs)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        args, kwargs = _spoiled(name, "")
        objective(module(*args, **kwargs)).backward()
    for module in modules.values():
        module.close()
    return found


def late_on_ranks() -> list[str]:
    """Runs on a rank: steps of which rank 1 cannot use the second and the fourth."""
    module = _program("history", (1, 2, 1)).distribute()
    found = []
    for kind in ("", "key", "", "key", ""):
        args, kwargs = _spoiled("history", kind if dist.get_rank() == 1 else "")
        try:
            objective(module(*args, **kwargs)).backward()
        except Exception as error:
            found.append(type(error).__name__)
    module.close()
    return found


def test_a_bad_batch_behind_good_ones(ranks: Ranks) -> None:
    """The averaging of gradients has an exchange of its own before the second forward, which no rank may miss."""
    assert ranks(2, late_on_ranks, collective=20.0) == [["DistributedError"] * 2, ["InputError"] * 2]


def test_a_bad_batch_raises_on_all_ranks(ranks: Ranks) -> None:
    expected = {
        ("functional", "range"): ("InputError", f"feature 'x' has id 1.., outside its table of {BIG} rows"),
        ("functional", "negative"): ("InputError", f"feature 'x' has id -.*, outside its table of {BIG} rows"),
        ("functional", "floats"): ("InputError", r"'x' must hold integer ids, got torch\.float32"),
        ("field aware", "count"): ("InputError", r"'x' has ids of shape \(2, 8\).*compiled for shape \(B, 4\)"),
        ("offsets", "offsets"): ("InputError", r"the offsets of 'a' must start at 0 and not decrease"),
        ("history", "key"): ("InputError", r"the batch has no batch\['history'\], which the model reads"),
    }
    on_good, on_bad = ranks(2, bad_on_ranks, list(expected))
    for (name, message), (good, other), (error, text) in zip(on_bad, on_good, expected.values(), strict=True):
        assert name == error
        assert re.search(text, message), message
        assert good == "DistributedError" and "rank 1" in other
