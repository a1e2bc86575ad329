"""One rank's part of a program: its own tables, the lowered graph, synchronised dense gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..errors import DistributedError
from ..graphs import clone_sharing_tensors, resolve_parameter
from ..stage import ALL_TO_ALL, WAIT, Stage
from .base import RankContext, Traffic
from .consensus import agree
from .groups import TowerGroups, timeout_of
from .ids import FAILED
from .materialize import materialize


class RankModule(nn.Module):
    """What a rank trains. Call it with the rank's local batch, as the flat model is called.

    The objective is the mean over ranks of each rank's mean loss: after ``backward()`` every gradient is that of the
    objective. Table gradients are complete on the table's owner; dense gradients are averaged over all ranks during
    backward. Batches may differ in size between ranks and may be empty; every rank must run every step. Buffers (running
    statistics) are each rank's own, as the flat model would have them on that rank's samples.

    ``state_dict()`` has the flat model's keys, less the tables of other ranks; :meth:`full_state_dict` gathers those, and
    ``load_state_dict`` takes either.
    """

    def __init__(
        self,
        stage: Stage,
        context: RankContext,
        groups: TowerGroups,
        group: ProcessGroup,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__()
        root = context.root
        self.__dict__["_parameters"] = root._parameters
        self.__dict__["_buffers"] = root._buffers
        self.__dict__["_modules"] = root._modules
        self.__dict__["_non_persistent_buffers_set"] = root._non_persistent_buffers_set
        self.training = root.training
        self.plan = stage.plan
        self.rank = context.rank
        self._lookups = stage.lookups
        self._flat_keys = tuple(stage.root.state_dict(keep_vars=True))
        self._context = context
        self._groups: TowerGroups | None = groups
        self._group = group
        own = {stage.lookups.table[name].parameter for name in stage.plan.tables_of_rank[context.rank]}
        self._table_names = tuple(name for name, _ in root.named_parameters() if name in own)
        graph_module = stage.bind(context).compile(groups.names(), f"Rank{context.rank}")
        # Held in a tuple: their parameters are already registered above, under the flat model's names.
        self._run: tuple[nn.Module, ...] = (
            _synchronised(graph_module, own, group, find_unused_parameters),
            graph_module,
        )
        self.register_load_state_dict_pre_hook(_drop_foreign_tables)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._groups is None:
            raise DistributedError("this module's process groups were closed: distribute the program again")
        self._context.announced = False
        try:
            return self._run[0](*args, **kwargs)
        except Exception:
            if not self._context.announced:
                self._announce_failure()
            raise

    def _announce_failure(self) -> None:
        """Take part in the first exchange of the step with a mark that makes every rank raise, so that none waits for this one."""
        assert self._groups is not None
        world = self.plan.topology.world_size
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        marks = torch.full((3 * world,), FAILED, dtype=torch.long, device=device)
        WAIT(ALL_TO_ALL(marks, [3] * world, [3] * world, self._groups.world.group_name))

    def train(self, mode: bool = True) -> RankModule:
        super().train(mode)
        self._context.root.training = mode
        for module in self._run:
            module.training = mode
        return self

    @property
    def traffic(self) -> Traffic:
        """Bytes that the exchanges of this rank have sent to other ranks (dense gradient synchronisation not counted)."""
        return self._context.traffic

    @property
    def graph_module(self) -> fx.GraphModule:
        """The lowered graph with this rank's process groups."""
        module = self._run[1]
        assert isinstance(module, fx.GraphModule)
        return module

    def table_parameters(self) -> Iterator[nn.Parameter]:
        """The tables that this rank owns."""
        for name in self._table_names:
            yield self.get_parameter(name)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters that are not tables; the same values on every rank."""
        own = set(self._table_names)
        for name, parameter in self.named_parameters():
            if name not in own:
                yield parameter

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate dense gradients without averaging them, as for DistributedDataParallel."""
        runner = self._run[0]
        return runner.no_sync() if isinstance(runner, DistributedDataParallel) else nullcontext()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The flat model's state dict, keys in its order, with every rank's tables. A collective call; a copy on every rank."""
        own = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        owner = {self._lookups.table[t].parameter: rank for rank, names in enumerate(self.plan.tables_of_rank) for t in names}
        tables = {table.parameter: table for table in self._lookups.tables}
        result: dict[str, torch.Tensor] = {}
        ranks = dist.get_process_group_ranks(self._group)
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        for key in self._flat_keys:
            if key in tables:
                table = tables[key]
                mine = owner[key] == self.rank
                value = own[key].clone() if mine else torch.empty(table.rows, table.dim, dtype=table.dtype, device=device)
                dist.broadcast(value, src=ranks[owner[key]], group=self._group)
                result[key] = value
            elif key in own:
                result[key] = own[key].clone()
        # A table registered under several names is one tensor under each of them.
        for alias, key in self._context.aliases.items():
            result[alias] = result[key]
        return {key: result[key] for key in self._flat_keys}

    def close(self) -> None:
        """Release the process groups; a collective call. The parameters stay usable."""
        if self._groups is not None:
            self._run = ()
            self._groups.destroy()
            self._groups = None


def _drop_foreign_tables(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a rank load the flat model's state dict: tables of other ranks are not its business."""
    assert isinstance(module, RankModule)
    for key in module._context.foreign:
        state_dict.pop(prefix + key, None)


def _synchronised(module: fx.GraphModule, tables: set[str], group: ProcessGroup, find_unused: bool) -> nn.Module:
    """``module`` with dense gradients averaged over ``group``; parameters that the graph never reads are left alone."""
    ignored = sorted(tables | (set(dict(module.named_parameters())) - _used_parameters(module)))
    trained = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    if not trained:
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return DistributedDataParallel(
        module,
        process_group=group,
        broadcast_buffers=False,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )


def _used_parameters(module: fx.GraphModule) -> set[str]:
    names = {id(p): name for name, p in module.named_parameters()}
    used: set[str] = set()
    for node in module.graph.nodes:
        if node.op == "call_module":
            found: list[Any] = list(module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            owner, attribute = resolve_parameter(module, str(node.target))
            found = [getattr(owner, attribute)]
        else:
            continue
        used.update(names[id(p)] for p in found if id(p) in names)
    return used


def distribute(
    stage: Stage,
    process_group: ProcessGroup | None,
    *,
    device: torch.device | str | None,
    timeout: timedelta | None,
    check_ids: bool,
    find_unused_parameters: bool,
) -> RankModule:
    """See :meth:`TowerProgram.distribute`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError(
            "program.distribute() needs a process group: start the script with torchrun and call torch.distributed.init_process_group() "
            "first; without one, call the program itself (one device) or program.simulate()"
        )
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    world, topology = dist.get_world_size(group), stage.plan.topology
    if world != topology.world_size:
        raise DistributedError(
            f"the process group has {world} ranks, the program was compiled for {topology.hosts} hosts x {topology.ranks_per_host} ranks "
            f"= {topology.world_size}: use Topology.from_env() or start {topology.world_size} ranks"
        )
    agree(stage, group)
    rank = dist.get_rank(group)
    root = clone_sharing_tensors(stage.root)
    foreign, aliases = _prune(root, stage, rank)
    tensors = [*root.parameters(), *root.buffers()]
    home = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    if any(t.is_meta for t in tensors):
        home = torch.device(device) if device is not None else home
        materialize(root, stage.lookups, home)
    groups = TowerGroups.create(group, stage.plan.grid, timeout or timeout_of(group, home))
    context = RankContext(rank, root, topology, check_ids=check_ids, foreign=foreign, aliases=aliases)
    return RankModule(stage, context, groups, group, find_unused_parameters)


def _prune(root: nn.Module, stage: Stage, rank: int) -> tuple[frozenset[str], Mapping[str, str]]:
    """Remove other ranks' tables from ``root``; the names removed, and for every further name of a table its first one."""
    own = set(stage.plan.tables_of_rank[rank])
    first = {id(root.get_parameter(table.parameter)): table for table in stage.lookups.tables}
    foreign: set[str] = set()
    aliases: dict[str, str] = {}
    for path, module in root.named_modules():
        for name, parameter in list(module._parameters.items()):
            table = first.get(id(parameter))
            if table is None:
                continue
            key = f"{path}.{name}" if path else name
            if key != table.parameter:
                aliases[key] = table.parameter
            if table.name not in own:
                del module._parameters[name]
                foreign.add(key)
    return frozenset(foreign), aliases
