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

from ..stage import Stage
from ..towers.holder import TowerHolder
from ..towers.record import HOLDER


class TowerSync:
    """The module of this rank's tower. ``ids`` are the identities of its tensors, which belong to no other tower.

    Each rank of a tower runs it on the samples of its own peers, so that the sum of the gradients over the tower's ranks is the
    gradient of the sum of all ranks' losses; the objective is their mean.
    """

    def __init__(self, root: nn.Module, stage: Stage, rank: int, group: ProcessGroup, find_unused: bool) -> None:
        plan = self._plan = stage.plan
        self._any = bool(stage.vectors)
        self._rank = rank
        self.tower = plan.grid.tower_of(rank)
        self._module = own_module(root, stage, rank)
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.ids: frozenset[int] = frozenset()
        self.runner: nn.Module | None = None
        if self._module is None:
            return
        self.parameters = tuple(self._module.parameters())
        tensors = [*self.parameters, *self._module.buffers(), *_holder(root).own_buffer(self.tower)]
        self.ids = frozenset(map(id, tensors))
        copy_from_first(tensors, group)
        if any(parameter.requires_grad for parameter in self.parameters):
            self.runner = _averaged(self._module, group, plan.topology.world_size, find_unused)

    @property
    def first(self) -> bool:
        """Whether this rank is the first of its tower, which speaks for it where each tower counts once."""
        return self._rank == self._plan.grid.tower_ranks(self.tower)[0]

    def synchronises(self) -> bool:
        """Whether the next backward is to add gradients up."""
        return isinstance(self.runner, DistributedDataParallel) and bool(self.runner.require_backward_grad_sync)

    def full_state(self, own: Mapping[str, Any], group: ProcessGroup, device: torch.device | None) -> dict[str, Any]:
        """All towers' entries of the state dict, from the first rank of each; ``own`` is this rank's. A collective call."""
        if not self._any:
            return {}
        ranks = dist.get_process_group_ranks(group)
        mine = {key: value for key, value in own.items() if key.startswith(f"{HOLDER}.")} if self.first else {}
        told: list[Any] = [None] * len(ranks)
        # The type may have been changed since the program was compiled; what is no tensor travels at once.
        dist.all_gather_object(told, {key: _told(value) for key, value in mine.items()}, group=group)
        found: dict[str, Any] = {}
        for tower in range(self._plan.grid.towers):
            source = self._plan.grid.tower_ranks(tower)[0]
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


def own_module(root: nn.Module, stage: Stage, rank: int) -> nn.Module | None:
    """The module of a rank's tower in a tower model's tree, None if the tower has none."""
    tower = stage.plan.grid.tower_of(rank)
    return next((root.get_submodule(one.target) for one in stage.vectors if one.tower == tower), None)


def drop_other_towers(root: nn.Module, stage: Stage, rank: int) -> frozenset[str]:
    """Remove the modules of all towers but a rank's own; the state-dict keys that a rank need not load, of what is gone."""
    if not stage.vectors:
        return frozenset()
    gone = _holder(root).keep_only(stage.plan.grid.tower_of(rank))
    return frozenset(f"{HOLDER}.{key}" for key in gone)


def _holder(root: nn.Module) -> TowerHolder:
    holder = root.get_submodule(HOLDER)
    assert isinstance(holder, TowerHolder)
    return holder


def take_from_first_rank(root: nn.Module, stage: Stage, rank: int, group: ProcessGroup, home: torch.device) -> None:
    """Give the modules of all towers the values that rank 0 of the group has, where it has any; a collective call.

    Other ranks may have drawn them with another seed, or have a warm start from other samples. The layers around them begin with
    rank 0's values, and fit its modules only. ``root`` is this rank's, with values; its tower's tensors may be copies of the
    program's, which are written too.
    """
    if not stage.vectors:
        return
    told: list[Any] = [None] * dist.get_world_size(group)
    whole = {one.target: stage.root.get_submodule(one.target) for one in stage.vectors}
    kept = own_module(root, stage, rank)
    own = next((one.target for one in stage.vectors if one.tower == stage.plan.grid.tower_of(rank)), None)
    tensors = {f"{target}.{name}": tensor for target, module in whole.items() for name, tensor in _tensors(module).items()}
    mine = {f"{own}.{name}": tensor for name, tensor in _tensors(kept).items()} if kept is not None else {}
    dist.all_gather_object(told, [name for name, tensor in tensors.items() if not tensor.is_meta], group=group)
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for name in told[0]:
            value = mine.get(name, tensors[name]).detach()
            value = torch.empty_like(value, device=home) if value.is_meta else value.to(home).contiguous()
            dist.broadcast(value, src=source, group=group)
            for tensor in (tensors[name], mine.get(name)):
                if tensor is not None and not tensor.is_meta and tensor.data_ptr() != value.data_ptr():
                    tensor.copy_(value)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def copy_from_first(tensors: list[torch.Tensor], group: ProcessGroup, home: torch.device | None = None) -> None:
    """Give all ranks of a group the values that its first one has; a collective call.

    ``home`` is the device that they exchange values on, the tensors' own by default.
    """
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for tensor in tensors:
            value = tensor.detach().to(device=home).resolve_conj().resolve_neg().contiguous()
            if value.numel():
                # As bytes, because transports do not know every type.
                dist.broadcast(value.view(-1).view(torch.uint8), src=source, group=group)
            held = tensor.detach()
            for dimension, stride in enumerate(tensor.stride()):
                if not stride and held.shape[dimension]:
                    # A value that is repeated in memory is written once.
                    held, value = (one.narrow(dimension, 0, 1) for one in (held, value))
            if value.data_ptr() != held.data_ptr():
                held.copy_(value)


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
