"""A tower's module on the ranks of its tower: the same values, gradients added up over the tower and divided by the world size."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..plan import TowerPlan
from ..towers.record import HOLDER


class TowerSync:
    """The module of this rank's tower. ``ids`` are the identities of its tensors, which belong to no other tower.

    Each rank of a tower runs it on the samples of its own peers, so that the sum of the gradients over the tower's ranks is the
    gradient of the sum of all ranks' losses; the objective is their mean.
    """

    def __init__(self, root: nn.Module, plan: TowerPlan, rank: int, group: ProcessGroup, find_unused: bool) -> None:
        self._plan = plan
        self._any = HOLDER in root._modules
        self._rank = rank
        self.tower = plan.grid.tower_of(rank)
        self._module = own_module(root, self.tower)
        self.parameters = () if self._module is None else tuple(self._module.parameters())
        self.ids = frozenset(id(tensor) for tensor in (*self.parameters, *(self._module.buffers() if self._module else ())))
        self.runner: nn.Module | None = None
        if self._module is None:
            return
        copy_from_first([*self.parameters, *self._module.buffers()], group)
        if any(parameter.requires_grad for parameter in self.parameters):
            self.runner = _averaged(self._module, group, plan.topology.world_size, find_unused)

    @property
    def first(self) -> bool:
        """Whether this rank is the first of its tower, which speaks for it where each tower counts once."""
        return self._rank == self._plan.towers[self.tower].ranks[0]

    def synchronises(self) -> bool:
        """Whether the next backward is to add gradients up."""
        return isinstance(self.runner, DistributedDataParallel) and bool(self.runner.require_backward_grad_sync)

    def full_state(self, own: Mapping[str, Any], group: ProcessGroup, device: torch.device | None) -> dict[str, Any]:
        """All towers' entries of the state dict, from the first rank of each; ``own`` is this rank's. A collective call."""
        if not self._any:
            return {}
        ranks = dist.get_process_group_ranks(group)
        mine = {key: value for key, value in own.items() if key.startswith(f"{HOLDER}.{self.tower}.")} if self.first else {}
        told: list[Any] = [None] * len(ranks)
        # The type may have been changed since the program was compiled; what is no tensor travels at once.
        dist.all_gather_object(told, {key: _told(value) for key, value in mine.items()}, group=group)
        found: dict[str, Any] = {}
        for tower in self._plan.towers:
            source = tower.ranks[0]
            for key, (shape, value) in told[source].items():
                if shape is None:
                    found[key] = copy.deepcopy(value)
                    continue
                tensor = own[key].detach().clone().contiguous() if key in mine else torch.empty(shape, dtype=value, device=device)
                dist.broadcast(tensor, src=ranks[source], group=group)
                found[key] = tensor
        return found


@contextmanager
def unsynchronised(*runners: nn.Module | None) -> Iterator[None]:
    """``no_sync`` of each that has it."""
    with ExitStack() as all_of_them:
        for runner in runners:
            if isinstance(runner, DistributedDataParallel):
                all_of_them.enter_context(runner.no_sync())
        yield


def _told(value: Any) -> tuple[Any, Any]:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (None, value)


def own_module(root: nn.Module, tower: int) -> nn.Module | None:
    """A tower's module in a tower model's tree, None if the tower has none."""
    holder = root._modules.get(HOLDER)
    return None if holder is None else holder._modules.get(str(tower))


def drop_other_towers(root: nn.Module, tower: int) -> frozenset[str]:
    """Remove the modules of all towers but one; the state-dict keys that are gone."""
    holder = root._modules.get(HOLDER)
    if holder is None:
        return frozenset()
    gone = [key for key in holder.state_dict(keep_vars=True) if key.partition(".")[0] != str(tower)]
    for number in [number for number in holder._modules if number != str(tower)]:
        del holder._modules[number]
    return frozenset(f"{HOLDER}.{key}" for key in gone)


def copy_from_first(tensors: list[torch.Tensor], group: ProcessGroup) -> None:
    """Give all ranks of a group the values that its first one has; a collective call."""
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.detach().contiguous()
            dist.broadcast(value, src=source, group=group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def _averaged(module: nn.Module, group: ProcessGroup, world: int, find_unused: bool) -> DistributedDataParallel:
    runner = DistributedDataParallel(
        module,
        process_group=group,
        forward_sync_buffers=False,
        init_sync=False,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )

    def add_up(state: object, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        # One division of the whole sum keeps whole numbers whole.
        return work.get_future().then(lambda done: done.value()[0].div_(world))

    # It compares annotations with classes, and here they are text.
    add_up.__annotations__.clear()
    runner.register_comm_hook(None, add_up)
    return runner
