"""Several programs side by side, sub-groups of a job, modules that are closed and made again, and options of distribute()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, build, copied, flat_step, gradients_of, inputs_of, merged, objective, tables_of
from ranks import Ranks
from torch import nn

import dmt_compile
from dmt_compile import Topology
from dmt_compile.exchange import IdExchange
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


class Choosy(nn.Module):
    """Uses one of two layers, by the sign of its input; kept whole, because it branches on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(models.DENSE, 1), nn.Linear(models.DENSE, 1)

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return self.positive(dense) if bool(dense[0, 0] > 0) else self.negative(dense)


class ChoosyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.choosy, self.ebc, self.top = Choosy(), models.plain_collection(), nn.Linear(40, 1)

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        return self.choosy(dense) + self.top(self.ebc(sparse).values())


def _choosy_inputs(rank: int) -> tuple[Any, ...]:
    dense, sparse = models.torchrec_inputs(2, seed=rank)
    return dense.abs() * (-1) ** rank, sparse


def layers_that_some_ranks_skip() -> list[Tensors]:
    module = dmt_compile.towerize(ChoosyModel(), Topology(3, 1)).distribute(find_unused_parameters=True)
    found = []
    for _ in range(3):
        module.zero_grad()
        objective(module(*_choosy_inputs(dist.get_rank()))).backward()
        found.append(gradients_of(module))
    module.close()
    return found


def test_layers_that_some_ranks_skip(ranks: Ranks) -> None:
    found = ranks(3, layers_that_some_ranks_skip)
    flat = flat_step(ChoosyModel(), [_choosy_inputs(rank) for rank in range(3)], [2] * 3)
    for step in range(3):
        gradients = merged([part[step] for part in found], tables_of(ChoosyModel()))
        worst, parameter = furthest(gradients, flat.gradients)
        assert worst <= 1, (parameter, worst)


def wide_ids() -> tuple[tuple[Tensors, Tensors], int]:
    """With a table of more than 2^31 rows ids travel as int64; here they are made to."""
    module = dmt_compile.towerize(build(NAMES[0]), Topology(2, 1)).distribute()
    rank, sizes = dist.get_rank(), [2, 3]
    _step(module, NAMES[0], sizes, rank)
    narrow = module.traffic.across_hosts
    for part in module.graph_module.modules():
        if isinstance(getattr(part, "exchange", None), IdExchange):
            assert part.exchange.id_dtype is torch.int32
            part.exchange = replace(part.exchange, id_dtype=torch.int64)
    module.traffic.reset()
    found = _step(module, NAMES[0], sizes, rank)
    more = module.traffic.across_hosts - narrow
    module.close()
    return found, more


def test_wide_ids(ranks: Ranks) -> None:
    found = ranks(2, wide_ids)
    _check(NAMES[0], [2, 3], [step for step, _ in found])
    assert all(more > 0 and more % 4 == 0 for _, more in found)
