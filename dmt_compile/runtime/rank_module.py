"""One rank's part of a program: its own tables, the lowered graph, synchronised dense gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..errors import DistributedError
from ..graphs import clone_sharing_tensors
from ..stage import Stage
from ..verify.deal import Layout
from .announce import announce_failure
from .base import Progress, RankContext, Traffic
from .checkpoint import load_optimizer_state, optimizer_state, own_rows, show_whole_tables, take_own_rows
from .consensus import agree
from .data_parallel import ByMode, compiled, synchronised
from .groups import TowerGroups, refuse_device, timeout_of
from .materialize import materialize
from .ownership import prune
from .tower_sync import TowerSync, own_module, take_from_first_rank, unsynchronised


class RankModule(nn.Module):
    """What a rank trains. Call it with the rank's local batch, as the flat model is called.

    The objective is the mean over ranks of each rank's mean loss: after ``backward()`` every gradient is that of the
    objective. Table gradients are complete on the table's owner, those of a tower's module on all ranks of the tower; dense
    gradients are averaged over all ranks during backward. Batches may differ in size between ranks and may be empty; every rank
    must run every step. Buffers (running statistics) are each rank's own, as the flat model would have them on that rank's
    samples. As with DistributedDataParallel, a forward is followed by one backward, else it runs under :meth:`no_sync`; a second
    backward is refused.

    A rank that cannot use its batch tells the others before anything is exchanged: all raise, and the next step may follow. A
    failure later in the step ends the module on all ranks: those that wait for the failed rank get an error at once, the rest
    when their wait times out. In a program that is left flat nothing is exchanged in forward, so that a rank can tell the others
    of every failure in it.

    ``state_dict()`` has the program's keys, less the tables of other ranks and the modules of other towers; a parameter that
    holds tables of several ranks stands in it as :class:`RowShards`. :meth:`full_state_dict` gathers all of them, and
    ``load_state_dict`` takes either.
    """

    def __init__(
        self,
        stages: Mapping[bool, Stage],
        context: RankContext,
        groups: TowerGroups,
        group: ProcessGroup,
        find_unused_parameters: bool,
        layouts: Mapping[bool, Layout],
    ) -> None:
        super().__init__()
        stage, root = stages[True], context.root
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
        own = {id(root.get_parameter(stage.lookups.table[name].parameter)) for name in stage.plan.tables_of_rank[context.rank]}
        self._table_names = tuple(name for name, parameter in root.named_parameters() if id(parameter) in own)
        self._tower = TowerSync(root, stage, context.rank, groups.tower, find_unused_parameters)
        context.tower = self._tower.runner
        graphs = compiled(stages, context, groups, layouts)
        # Held in a tuple: their parameters are already registered above, under the flat model's names.
        runner = synchronised(graphs, own | self._tower.ids, group, find_unused_parameters)
        self._run: tuple[nn.Module, ByMode] | None = (runner, graphs)
        self._over = ""
        # Called on the class: mypy exempts torch's own functions from its rule on untyped calls, but not inherited ones.
        nn.Module.register_load_state_dict_pre_hook(self, partial(take_own_rows, context, self._lookups))
        nn.Module.register_state_dict_post_hook(self, partial(show_whole_tables, context, self._lookups))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, _ = self._running()
        context = self._context
        context.progress = Progress.READING
        synchronised = isinstance(run, DistributedDataParallel) and run.require_backward_grad_sync
        synchronised = synchronised or self._tower.synchronises()
        context.sums_in_backward = synchronised and torch.is_grad_enabled()
        context.open = context.open or context.sums_in_backward
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if type(error).__module__ == "torch.utils.checkpoint":
                raise  # Not a failure: how activation checkpointing ends a recomputation early.
            lost = _is_lost_connection(error)
            if context.progress is Progress.READING and not lost:
                # The rank's own error says more than a failure to tell it to the others.
                with suppress(Exception):
                    assert self._groups is not None
                    announce_failure(context, self._groups.world)
            elif lost or context.progress is Progress.EXCHANGING:
                self._over = f"an exchange was broken off on this rank ({type(error).__name__}: {error})"
                self._release(abort=True)
                if lost:
                    raise DistributedError(
                        "another rank failed, left or did not answer in time during an exchange; the error that it raised says why"
                    ) from error
            raise

    def _running(self) -> tuple[nn.Module, ByMode]:
        if self._run is None:
            raise DistributedError(f"this module cannot run any more: {self._over}; distribute the program again, on all ranks")
        return self._run

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that the norm over the whole model, all ranks' tables included, is at most ``max_norm``.

        A collective call; returns that norm. ``torch.nn.utils.clip_grad_norm_`` would see only this rank's tables, and scale the
        dense gradients by another factor on every rank.
        """
        tables, dense, tower = list(self.table_parameters()), list(self.dense_parameters()), list(self.tower_parameters())
        counted = {id(parameter) for parameter in tower}
        own, shared = _gradients(tables), _gradients([one for one in dense if id(one) not in counted])
        # The ranks of a tower hold the same: one of them counts.
        own += _gradients(tower) if self._tower.first else []
        device = self._context.device
        norms = torch.zeros(dist.get_world_size(self._group), dtype=torch.float32, device=device)
        norms[self.rank] = nn.utils.get_total_norm(own, norm_type) if own else 0.0
        dist.all_reduce(norms, group=self._group)
        parts = [*norms.unbind(), nn.utils.get_total_norm(shared, norm_type).to(norms)] if shared else list(norms.unbind())
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        nn.utils.clip_grads_with_norm_([*tables, *dense], max_norm, norm)
        return norm

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; takes the whole program's state dict as well as this rank's.

        Without tower modules the whole program's is the flat model's.

        Raises:
            DistributedError: ``assign`` is set: the gradient synchronisation holds on to the parameters that are there.
            PlanError: it holds tower modules of towers of other features.
        """
        if assign:
            raise DistributedError("a RankModule cannot take over the tensors of a state dict: load it with assign=False")
        return super().load_state_dict(state_dict, strict=strict)

    def train(self, mode: bool = True) -> RankModule:
        super().train(mode)
        self._context.root.training = mode
        runner, graphs = self._run or (None, None)
        for module in (runner, graphs, *(graphs.graphs.values() if graphs is not None else ())):
            if module is not None:
                module.training = mode
        return self

    @property
    def traffic(self) -> Traffic:
        """Bytes that the exchanges of this rank have sent to other ranks (dense gradient synchronisation not counted)."""
        return self._context.traffic

    @property
    def graph_module(self) -> fx.GraphModule:
        """The lowered graph, for the current mode, with this rank's process groups."""
        return self._running()[1].graphs[self.training]

    def table_parameters(self) -> Iterator[nn.Parameter]:
        """The tables that this rank owns."""
        for name in self._table_names:
            yield self._parameter(name)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters that are not tables, the tower module's too; the same on every rank, or on every rank of the tower."""
        own = set(self._table_names)
        for name, parameter in self.named_parameters():
            if name not in own:
                yield parameter

    def tower_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the module of this rank's tower, which are dense parameters too."""
        yield from self._tower.parameters

    def _parameter(self, name: str) -> nn.Parameter:
        # Not from this module: its own methods would hide parameters that are called as they are.
        return self._context.root.get_parameter(name)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate dense gradients, those of tower modules too, without averaging them, as for DistributedDataParallel."""
        runner, _ = self._running()
        return unsynchronised(runner, self._tower.runner)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole program's state dict, keys in its order, with every rank's tables and all towers' modules.

        Without tower modules it is the flat model's. A collective call; a copy on every rank.
        """
        own = self.state_dict()
        owner = {name: rank for rank, names in enumerate(self.plan.tables_of_rank) for name in names}
        shards = self._lookups.shards
        result = self._tower.full_state(own, self._group, self._context.device)
        ranks = dist.get_process_group_ranks(self._group)
        # The tables may have been cast since the program was compiled.
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, {key: own[key].dtype for key in own if key in shards}, group=self._group)
        for key in self._flat_keys:
            if key in shards:
                tables = shards[key]
                dtype = gathered[owner[tables[0].name]][key]
                value = torch.empty(tables[-1].end, tables[0].dim, dtype=dtype, device=self._context.device)
                for table in tables:
                    rows = value[table.start : table.end]
                    if owner[table.name] == self.rank:
                        rows.copy_(own_rows(self._context, self._parameter(table.parameter).detach(), table))
                    dist.broadcast(rows, src=ranks[owner[table.name]], group=self._group)
                result[key] = value
            elif key in own and key not in self._context.aliases and key not in result:
                value = own[key]
                result[key] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        # A table registered under several names is one tensor under each of them.
        for alias, key in self._context.aliases.items():
            result[alias] = result[key]
        return {key: result[key] for key in self._flat_keys}

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer over this rank's parameters, by parameter name, for ``torch.distributed.checkpoint``.

        As torch's ``get_optimizer_state_dict`` flattened by parameter, but what an optimizer keeps for the rows of a table that
        several ranks hold stands in it as :class:`RowShards`: as plain tensors under one name, a checkpoint would keep one rank's
        rows for all. Loading into it loads into the optimizer's own tensors; :meth:`load_optimizer_state_dict` does the rest. An
        optimizer that has not stepped yet gets its state here, unless there are gradients: ``zero_grad()`` first.
        """
        return optimizer_state(self, self._context, self._lookups, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`optimizer_state_dict` has returned, saved or loaded.

        Raises:
            DistributedError: it lacks rows that this rank holds.
        """
        load_optimizer_state(self, self._context, self._lookups, optimizer, state_dict)

    def close(self) -> None:
        """Release the process groups; a collective call. The parameters stay usable."""
        self._over = self._over or "it was closed"
        self._release(abort=False)

    def _release(self, abort: bool) -> None:
        self._run = self._tower.runner = self._context.tower = None
        if self._groups is not None:
            groups, self._groups = self._groups, None
            if abort:
                groups.abort()
            else:
                groups.destroy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a RankModule lives in its process groups and cannot be copied or pickled: save state_dict() or full_state_dict(), "
            "and copy the TowerProgram it came from"
        )


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """What a norm is taken of; sparse gradients are coalesced, because a row that stands in them twice counts once, as its sum."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad.values())
        elif parameter.grad is not None:
            found.append(parameter.grad)
    return found


def _is_lost_connection(error: Exception) -> bool:
    """Whether the transport raised: gloo has no exception class of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def distribute(
    stages: Mapping[bool, Stage],
    process_group: ProcessGroup | None,
    *,
    device: torch.device | str | None,
    timeout: timedelta | None,
    check_ids: bool,
    find_unused_parameters: bool,
    layouts: Mapping[bool, Layout],
) -> RankModule:
    """See :meth:`TowerProgram.distribute`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError(
            "program.distribute() needs a process group: start the script with torchrun and call "
            "torch.distributed.init_process_group() first; without one, call the program itself (one device) or program.simulate()"
        )
    stage = stages[True]
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None
    rank, world, topology = dist.get_rank(group), dist.get_world_size(group), stage.plan.topology
    if rank < 0:
        raise DistributedError(f"rank {dist.get_rank()} is no member of the process group: only its members call distribute()")
    # Before any rank may raise on its own: the others would wait for it.
    number = agree(stages, group, {"find_unused_parameters": find_unused_parameters})
    if world != topology.world_size:
        raise DistributedError(
            f"the process group has {world} ranks, the program was compiled for {topology.hosts} hosts x "
            f"{topology.ranks_per_host} ranks = {topology.world_size}: use Topology.from_env() or start {topology.world_size} ranks"
        )
    root = clone_sharing_tensors(stage.root)
    pruned = prune(root, stage, rank)
    # A rank may be left without any tensor, so the whole model is asked.
    tensors = [*stage.root.parameters(), *stage.root.buffers()]
    home = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    if any(t.is_meta for t in tensors):
        # By way of a tensor, because "cuda" alone names the current device.
        home = torch.empty(0, device=device).device if device is not None else home
        materialize(root, stage.lookups, home, pruned.narrow)
        # A tower's module may have been made with values although the model has none.
        if (made := own_module(root, stage, rank)) is not None:
            made.to(home)
    refuse_device(dist.get_backend_config(group), home)
    take_from_first_rank(root, stage, rank, group, home)
    groups = TowerGroups.create(group, stage.plan.grid, timeout or timeout_of(group, home), number)
    context = RankContext(
        rank,
        root,
        topology,
        check_ids=check_ids,
        device=home,
        weight_dtype=_weight_dtype(stage),
        foreign=pruned.foreign,
        aliases=pruned.aliases,
        bases=pruned.bases,
    )
    return RankModule(stages, context, groups, group, find_unused_parameters, layouts)


def _weight_dtype(stage: Stage) -> torch.dtype | None:
    """The type that per-sample weights must have, if all weighted lookups read tables of one type."""
    lookups = stage.lookups
    read = {lookup.table for lookup in lookups.lookups if lookup.weighted}
    found = {stage.root.get_parameter(lookups.table[name].parameter).dtype for name in read}
    return found.pop() if len(found) == 1 else None
