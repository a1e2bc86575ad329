"""Real ranks against the lock-step cluster (same bits) and against the flat model in one process (the gradient contract)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from distributed_cases import (
    Step,
    build,
    copied,
    flat_step,
    gradients_of,
    inputs_of,
    lockstep_step,
    merged,
    objective,
    tables_of,
)
from ranks import Ranks

import dmt_compile
from dmt_compile.verify.compare import bits_differ, furthest

pytestmark = pytest.mark.multi_rank

# Hosts, ranks per host, towers: a tower per host, per rank, several per host, over two hosts, over all.
GRIDS = [
    (2, 2, 2),
    (1, 4, 1),
    (4, 1, 4),
    (1, 4, 2),
    (2, 4, 2),
    (2, 4, 8),
    (4, 2, 4),
    (4, 2, 2),
    (3, 1, 3),
    (1, 1, 1),
]


def step_on_ranks(name: str, grid: tuple[int, int, int], sizes: Sequence[Sequence[int]]) -> list[tuple[Any, Any]]:
    """Runs on a rank: outputs and gradients of one step per entry of ``sizes``."""
    import torch.distributed as dist

    hosts, local, towers = grid
    module = dmt_compile.towerize(build(name), dmt_compile.Topology(hosts, local), towers=towers).distribute()
    found = []
    for number, one in enumerate(sizes):
        module.zero_grad()
        output = module(*inputs_of(name, one, seed=number)[dist.get_rank()])
        objective(output).backward()
        found.append((copied(output), gradients_of(module)))
    module.close()
    return found


def check(name: str, grid: tuple[int, int, int], sizes: Sequence[Sequence[int]], found: Sequence[Any]) -> None:
    hosts, local, towers = grid
    model = build(name)
    tables = tables_of(model)
    for number, one in enumerate(sizes):
        inputs = inputs_of(name, one, seed=number)
        flat = flat_step(model, inputs, one)
        cluster = lockstep_step(model, dmt_compile.Topology(hosts, local), towers, inputs)
        ranks = Step([part[number][0] for part in found], merged([part[number][1] for part in found], tables))
        assert bits_differ(ranks.outputs, cluster.outputs) is None, one
        assert bits_differ([out for out, size in zip(ranks.outputs, one, strict=True) if size], flat.outputs) is None, one
        assert ranks.gradients.keys() == flat.gradients.keys() == cluster.gradients.keys()
        for table in tables:
            assert torch.equal(ranks.gradients[table], cluster.gradients[table]), (table, one)
        # Dense gradients are added up by the all-reduce in an order of its own; table gradients of the flat model per rank first.
        worst, parameter = furthest(ranks.gradients, flat.gradients)
        assert worst <= 1, (parameter, worst, one)


def _sizes(world: int, empty: bool) -> list[list[int]]:
    sizes = [[3] * world, [1 + (2 * rank) % 5 for rank in range(world)]]
    if empty:
        holes = range(world) if world <= 4 else (0, world - 1)
        sizes += [[0 if rank == hole else 2 for rank in range(world)] for hole in holes] if world > 1 else []
        sizes += [[0] * (world - 1) + [2]]
    return sizes


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_every_grid(ranks: Ranks, grid: tuple[int, int, int]) -> None:
    world = grid[0] * grid[1]
    sizes = _sizes(world, empty=True)
    check("two collections", grid, sizes, ranks(world, step_on_ranks, "two collections", grid, sizes))


@pytest.mark.parametrize("grid", [(2, 2, 2)], ids=lambda grid: "x".join(map(str, grid)))
@pytest.mark.parametrize("name", ["DLRM", "DLRM train", "DLRM_DCN train", "SimpleDeepFMNN train", "learnt weights"])
def test_every_model(ranks: Ranks, name: str, grid: tuple[int, int, int]) -> None:
    world = grid[0] * grid[1]
    # TorchRec's models cannot reshape an empty batch, on one device either.
    sizes = _sizes(world, empty=name == "learnt weights")
    check(name, grid, sizes, ranks(world, step_on_ranks, name, grid, sizes))
