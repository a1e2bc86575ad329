"""What ranks do together before their first exchange: agree on options and model, make groups, begin with the same values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import DistributedError
from ..runtime.groups import TowerGroups, timeout_of
from ..runtime.tower_sync import copy_from_first
from ..topology import Topology, TowerGrid
from .options import Options
from .owners import RANKS, Ranks


def alone() -> bool:
    """Whether there is one rank."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def topology_of(options: Options) -> Topology:
    """The topology of this job; one rank by default where there is no process group.

    Raises:
        DistributedError: it is not that of the process group, or the job's ranks have not started one.
    """
    started = dist.is_available() and dist.is_initialized()
    if not started:
        ranks = os.environ.get("WORLD_SIZE", "1")
        if options.topology is None and ranks != "1":
            raise DistributedError(
                f"the environment is that of a job of {ranks} ranks (WORLD_SIZE), but there is no process group, and every rank "
                "would train a model of its own: call torch.distributed.init_process_group before the compiled model runs"
            )
        return options.topology or Topology(1, 1)
    world = dist.get_world_size()
    topology = options.topology or (Topology(1, 1) if world == 1 else Topology.from_env())
    if topology.world_size != world:
        raise DistributedError(
            f"the process group has {world} rank{'s' * (world > 1)}, the topology is {topology.hosts} hosts x "
            f"{topology.ranks_per_host} ranks = {topology.world_size}: leave the option 'topology' to torchrun's environment, or "
            f"start {topology.world_size} ranks"
        )
    return topology


def ranks_for(options: Options) -> Ranks:
    """The process groups for these options; made, by all ranks alike, when the first graph is compiled.

    Raises:
        DistributedError: other ranks were given other options.
    """
    topology = topology_of(options)
    grid = TowerGrid.of(topology, options.towers or topology.hosts)
    world = dist.group.WORLD
    assert world is not None
    for key, ranks in list(RANKS.items()):
        if ranks.group is not world:
            # Its process group was destroyed.
            del RANKS[key]
    key = (topology, grid.towers, options.timeout)
    if key not in RANKS:
        mine = {"topology": topology, "towers": grid.towers, "partition": options.partition, "timeout": options.timeout}
        _refuse_differing("option", {name: str(value) for name, value in mine.items()}, world)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        timeout = timedelta(seconds=float(options.timeout)) if options.timeout else timeout_of(world, device)  # type: ignore[arg-type]
        groups = TowerGroups.create(world, grid, timeout, 0)
        dense = dist.new_group(list(range(dist.get_world_size())), timeout=timeout, group_desc="dmt:dense")
        RANKS[key] = Ranks(world, (groups, dense), dist.get_rank(), device)
    return RANKS[key]


def begin(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks rank 0's values of a model's parameters and buffers; a collective call where they have not got them yet.

    Of the whole model, because ranks need not compile the same graphs: each could else wait for values of other parameters.

    Raises:
        DistributedError: the ranks have different models; names the first parameter that differs.
    """
    ranks.averages.of(model).add(model.parameters())
    named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    if model not in ranks.begun:
        named += model.named_buffers()
        ranks.begun.add(model)
    known = [(name, one) for name, one in named if not is_lazy(one) and not one.is_meta]
    known = [(name, one) for name, one in known if one not in ranks.alike and ranks.owned(one) is None]
    if not known:
        return
    shapes = {name: f"{tuple(value.shape)} of {value.dtype}" for name, value in known}
    _refuse_differing("parameter", shapes, ranks.dense)
    same_values([value for _, value in known], ranks)


def same_values(tensors: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Give all ranks rank 0's values, but of tables, and of what has them already; a collective call."""
    rest = [one for one in tensors if one not in ranks.alike and ranks.owned(one) is None]
    copy_from_first(rest, ranks.dense, ranks.device)
    for one in rest:
        ranks.alike[one] = True


def _refuse_differing(kind: str, mine: dict[str, str], group: dist.ProcessGroup) -> None:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    for rank, theirs in enumerate(told):
        for name in (*told[0], *theirs):
            first, other = told[0].get(name, "missing"), theirs.get(name, "missing")
            if first != other:
                raise DistributedError(
                    f"backend 'dmt': {kind} '{name}' is {first} on rank 0 and {other} on rank {rank}: ranks need the same {kind}s"
                )
