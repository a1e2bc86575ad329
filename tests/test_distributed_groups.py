"""Several programs side by side, sub-groups of a job, and modules that are closed and made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, build, copied, flat_step, gradients_of, inputs_of, merged, objective, tables_of
from ranks import Ranks

import dmt_compile
from dmt_compile import Topology
from dmt_compile.verify.compare import bits_differ, furthest

pytestmark = pytest.mark.multi_rank

NAMES = ("two collections", "learnt weights")


def _check(name: str, sizes: list[int], found: list[tuple[Tensors, Tensors]], seed: int = 0) -> None:
    flat = flat_step(build(name), inputs_of(name, sizes, seed), sizes)
    assert bits_differ([output for output, _ in found], flat.outputs) is None
    worst, parameter = furthest(merged([part for _, part in found], tables_of(build(name))), flat.gradients)
    assert worst <= 1, (parameter, worst)


def _step(module: Any, name: str, sizes: list[int], rank: int, seed: int = 0) -> tuple[Tensors, Tensors]:
    module.zero_grad()
    output = module(*inputs_of(name, sizes, seed)[rank])
    objective(output).backward()
    return copied(output), gradients_of(module)


def two_at_once() -> list[tuple[Tensors, Tensors]]:
    rank, sizes = dist.get_rank(), [2, 1, 3, 2]
    grids = (Topology(2, 2), Topology(4, 1))
    modules = [dmt_compile.towerize(build(name), grid).distribute() for name, grid in zip(NAMES, grids, strict=True)]
    outputs = [module(*inputs_of(name, sizes)[rank]) for module, name in zip(modules, NAMES, strict=True)]
    for output in reversed(outputs):
        objective(output).backward()
    found = [(copied(output), gradients_of(module)) for output, module in zip(outputs, modules, strict=True)]
    modules[0].close()
    found.append(_step(modules[1], NAMES[1], sizes, rank, seed=1))
    modules[1].close()
    return found


def test_two_programs_in_one_group(ranks: Ranks) -> None:
    found = ranks(4, two_at_once)
    for number, name in enumerate(NAMES):
        _check(name, [2, 1, 3, 2], [part[number] for part in found])
    _check(NAMES[1], [2, 1, 3, 2], [part[2] for part in found], seed=1)


def again_and_again(times: int, subgroup: bool) -> tuple[list[tuple[Tensors, Tensors]], int]:
    group = dist.new_group(range(4)) if subgroup else None
    rank, world = dist.get_rank(), dist.distributed_c10d._world
    if subgroup and rank >= 4:
        return [], 0
    program = dmt_compile.towerize(build(NAMES[0]), Topology(2, 2))
    before, found = len(world.pg_map), []
    for number in range(times):
        module = program.distribute(group)
        found.append(_step(module, NAMES[0], [2, 1, 3, 2], rank, seed=number))
        if number % 2 and rank % 2:
            # Not in step: the next groups must not find what is left of these.
            torch.randn(200, 200).matmul(torch.randn(200, 200))
        module.close()
    return found, len(world.pg_map) - before


@pytest.mark.parametrize("subgroup", [False, True])
def test_distribute_close_distribute(ranks: Ranks, subgroup: bool) -> None:
    times = 12
    found = ranks(5 if subgroup else 4, again_and_again, times, subgroup)[:4]
    assert [left for _, left in found] == [0] * 4
    for number in range(times):
        _check(NAMES[0], [2, 1, 3, 2], [part[number] for part, _ in found], seed=number)


def two_halves() -> tuple[int, list[tuple[Tensors, Tensors]]]:
    """Two jobs of 4 ranks each, in groups whose ranks are not consecutive; one rank has made a group more than the others."""
    members = [[0, 2, 4, 6], [7, 5, 3, 1]]
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in members]
    half = dist.get_rank() % 2
    rank = members[half].index(dist.get_rank())
    assert dist.get_rank(groups[half]) == rank
    if dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)
    module = dmt_compile.towerize(build(NAMES[half]), Topology(2, 2)).distribute(groups[half])
    found = [_step(module, NAMES[half], [2, 1, 3, 2], rank, seed) for seed in range(2)]
    full = module.full_state_dict()
    assert all(torch.equal(full[key], value) for key, value in build(NAMES[half]).state_dict().items())
    module.close()
    return rank, found


def test_two_jobs_in_sub_groups(ranks: Ranks) -> None:
    found = ranks(8, two_halves)
    for half, name in enumerate(NAMES):
        by_rank = [part for _, part in sorted(found[half::2], key=lambda item: item[0])]
        for seed in range(2):
            _check(name, [2, 1, 3, 2], [part[seed] for part in by_rank], seed)


def after_the_job_ended() -> str:
    module = dmt_compile.towerize(build(NAMES[0]), Topology(2, 1)).distribute()
    _step(module, NAMES[0], [1, 1], dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
    module.close()
    return "closed"


def test_closing_after_the_process_group_was_destroyed(ranks: Ranks) -> None:
    assert ranks(2, after_the_job_ended) == ["closed", "closed"]
