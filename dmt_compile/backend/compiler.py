"""The backend that torch.compile calls with every graph that Dynamo makes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ..errors import CaptureError, DistributedError
from ..lookups import LookupSet
from ..stage import Stage
from ..topology import Topology, TowerGrid
from .averaging import module_being_compiled
from .lift import Lifted, lift
from .one_device import by_towers
from .options import Options
from .overlap import during_longest_exchange
from .owners import RANKS, Ranks, plan_for
from .records import find_lookups
from .rewrite import ANCHOR, rewritten

logger = logging.getLogger("dmt_compile")
_ALONE = (
    "backend 'dmt': there is one rank (no process group of several), so nothing is exchanged: the lookups of all towers run on "
    "this device"
)
_warned = False


@dataclass
class Counted:
    """How many graphs the backend was given since the process began, and what became of them."""

    rewritten: int = 0
    others: int = 0


counted = Counted()


def dmt(module: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None, **_: Any) -> Any:
    """Compile one graph: lookups are exchanged as SPTT does it (section 3.1), the rest goes to the inner backend as it is.

    What it computes is what the flat model computes on every rank's own batch. The objective is the mean over ranks of each
    rank's mean loss: gradients of tables are complete on their owners, all others are averaged in the backward pass.

    Args:
        options: see :class:`dmt_compile.backend.options.Options`.

    Raises:
        PlanError: options that do not exist, or do not fit.
        CaptureError: a table that is looked up in one graph and used otherwise in another; names it.
        DistributedError: the model is wrapped in DistributedDataParallel, or the topology is not that of the process group.
    """
    global _warned
    given = Options.of(options)
    inner = _inner(given)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        if not _warned:
            warnings.warn(_ALONE, stacklevel=2)
            _warned = True
        return inner(one_device_graph(module, given), example_inputs)
    if torch.nn.parallel.distributed.DistributedDataParallel._get_active_ddp_module() is not None:
        raise DistributedError(
            "the model is wrapped in DistributedDataParallel, which averages the gradients of tables that only their owners have: "
            "compile the model itself; backend 'dmt' averages the gradients of all else"
        )
    ranks = _ranks(given)
    whole = module_being_compiled()
    if whole is not None:
        ranks.averaging.add(whole.parameters())
    try:
        made = compiled_graph(module, given)
        _allow_sizes_from_data()
        if given.inner == "inductor":
            inner = partial(inner, config_patches=_INDUCTOR)
        anchored = any(node.op == "placeholder" and node.target == ANCHOR for node in made.graph.nodes)
        more = [ranks.anchor] if anchored else []
        return _Runner(inner(made, [*example_inputs, *more]), ranks, more)
    except torch._dynamo.exc.RestartAnalysis:
        # Dynamo will call again.
        raise
    except Exception as error:
        # The others may have compiled theirs, and would wait for this rank.
        ranks.end(
            f"a graph could not be compiled on this rank ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        )
        raise


# Exchanges begin as soon as what they send is there; inductor would else put each beside its wait. Its cache of graphs must not be
# used: a compiled graph names steps and process groups of this process.
_INDUCTOR = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", during_longest_exchange],
}


@dataclass(frozen=True)
class Staged:
    """One of Dynamo's graphs: with its parameters in a module tree, its lookups, and the stages of those that owners serve."""

    lifted: Lifted
    lookups: LookupSet
    replicated: Mapping[str, str]
    stages: Mapping[str, Stage]


def staged(module: fx.GraphModule, ranks: Ranks | None, options: Options, topology: Topology) -> Staged:
    """Find the lookups of a graph and run the passes on it; no stages where it has none."""
    lifted = lift(module)
    lookups, replicated = find_lookups(lifted.flat)
    known = {}
    for table in lookups.tables:
        rank = ranks.owned(lifted.root.get_parameter(table.parameter)) if ranks is not None else None
        if rank is not None:
            known[table.name] = rank
    if not lookups.lookups:
        return Staged(lifted, lookups, replicated, {})
    from dmt_compile.passes.pipeline import run

    plan = plan_for(lookups, known, (topology, options.towers, options.partition))
    return Staged(lifted, lookups, replicated, run(Stage("flat", lifted.flat, lifted.root, lookups, plan)))


def one_device_graph(module: fx.GraphModule, options: Options) -> fx.GraphModule:
    """The graph that the inner backend is to compile where there is one rank: with the lookups of all towers, tower by tower.

    The towers are those of ``options.topology``, so that a job's plan can be tried in one process; one tower by default.
    """
    started = dist.is_available() and dist.is_initialized()
    world = os.environ.get("WORLD_SIZE", "1")
    if not started and options.topology is None and world != "1":
        raise DistributedError(
            f"the environment is that of a job of {world} ranks (WORLD_SIZE), but there is no process group, and every rank would "
            "train a model of its own: call torch.distributed.init_process_group before the compiled model runs"
        )
    topology = _topology(options) if started else options.topology or Topology(1, 1)
    made = staged(module, None, options, topology)
    if not made.stages:
        counted.others += 1
        return module
    counted.rewritten += 1
    return by_towers(module, made.lifted, made.stages["towers"])


def compiled_graph(module: fx.GraphModule, options: Options) -> fx.GraphModule:
    """The graph that the inner backend is to compile, on a rank of a process group."""
    ranks = _ranks(options)
    made = staged(module, ranks, options, _topology(options))
    root, lookups = made.lifted.root, made.lookups
    _refuse_other_uses(made.lifted, {table.parameter for table in lookups.tables}, ranks)
    _make_alike(made.lifted, {table.parameter for table in lookups.tables}, ranks)
    if not made.stages:
        counted.others += 1
        return module
    lowered = made.stages["lowered"]
    result = rewritten(module, made.lifted, lowered, ranks)
    for rank, names in enumerate(lowered.plan.tables_of_rank):
        for name in names:
            parameter = root.get_parameter(lookups.table[name].parameter)
            ranks.owner[parameter] = rank
            if options.free_unowned and rank != ranks.rank:
                parameter.untyped_storage().resize_(0)
    counted.rewritten += 1
    logger.info("graph with %d lookups of %d tables rewritten", len(lookups.lookups), len(lookups.tables))
    for name, why in made.replicated.items():
        logger.info("table %s stays on every rank: %s", name, why)
    return result


def _make_alike(lifted: Lifted, tables: set[str], ranks: Ranks) -> None:
    """Give what is no table rank 0's values, as DistributedDataParallel does; all ranks compile the same graphs first."""
    parameters = [lifted.root.get_parameter(name) for _, name in lifted.arguments if name is not None and name not in tables]
    ranks.averaging.add(parameters)
    parameters = [parameter for parameter in parameters if parameter not in ranks.alike]
    with torch.no_grad():
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            own = [parameter for parameter in parameters if parameter.dtype == dtype]
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in own])
            dist.broadcast(flat, src=dist.get_global_rank(ranks.dense, 0), group=ranks.dense)
            for parameter, part in zip(own, flat.split([parameter.numel() for parameter in own]), strict=True):
                parameter.copy_(part.view(parameter.shape))
                ranks.alike[parameter] = True


def _refuse_other_uses(lifted: Lifted, tables: set[str], ranks: Ranks) -> None:
    """A table that one graph looks up must be looked up wherever it is used."""
    for _, name in lifted.arguments:
        if name is not None and name not in tables and ranks.owned(lifted.root.get_parameter(name)) is not None:
            raise CaptureError(
                f"table '{name}' is looked up in one graph and used otherwise in another, where only its owner would have it: use "
                "it in one graph (dmt_compile.explain names the graph break between them), then it stays on every rank"
            )


def _inner(options: Options) -> Callable[..., Any]:
    if callable(options.inner):
        return options.inner
    found: Callable[..., Any] = torch._dynamo.lookup_backend(options.inner)
    return found


def _topology(options: Options) -> Topology:
    world = dist.get_world_size()
    topology = options.topology or (Topology(1, 1) if world == 1 else Topology.from_env())
    if topology.world_size != world:
        _refuse_world(topology, world)
    return topology


def _refuse_world(topology: Topology, world: int) -> None:
    raise DistributedError(
        f"the process group has {world} rank{'s' * (world > 1)}, the topology is {topology.hosts} hosts x "
        f"{topology.ranks_per_host} ranks = {topology.world_size}: leave the option 'topology' to torchrun's environment, or start "
        f"{topology.world_size} ranks"
    )


def _ranks(options: Options) -> Ranks:
    """The process groups for these options; made, by all ranks alike, when the first graph is compiled."""
    from ..runtime.groups import TowerGroups, timeout_of

    topology = _topology(options)
    grid = TowerGrid.of(topology, options.towers or topology.hosts)
    world = dist.group.WORLD
    assert world is not None
    key = (id(world), topology, grid.towers, options.timeout)
    if key not in RANKS:
        _agree(options, topology, grid)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        timeout = timedelta(seconds=float(options.timeout)) if options.timeout else timeout_of(world, device)  # type: ignore[arg-type]
        groups = TowerGroups.create(world, grid, timeout, 0)
        dense = dist.new_group(list(range(dist.get_world_size())), timeout=timeout, group_desc="dmt:dense")
        anchor = torch.zeros((), device=device, requires_grad=True)
        RANKS[key] = Ranks(world, (groups, dense), dist.get_rank(), anchor)
    return RANKS[key]


def _agree(options: Options, topology: Topology, grid: TowerGrid) -> None:
    """Compare options over all ranks, before the groups are made that follow from them; a collective call."""
    mine = {"topology": str(topology), "towers": str(grid.towers), "partition": options.partition, "timeout": str(options.timeout)}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for rank, theirs in enumerate(told):
        for name, value in theirs.items():
            if value != told[0][name]:
                raise DistributedError(
                    f"backend 'dmt': option '{name}' is {told[0][name]} on rank 0 and {value} on rank {rank}: give all ranks the "
                    "same"
                )


def _allow_sizes_from_data() -> None:
    """How many ids another rank sends is known when they come: such sizes are symbols in the compiled graph."""
    context = torch._guards.TracingContext.try_get()
    fake = context.fake_mode if context is not None else None
    if fake is not None and fake.shape_env is not None:
        env = fake.shape_env
        env.settings = replace(env.settings, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


class _Runner:
    """A compiled graph, which ends the exchanges of all ranks if one of them is lost."""

    def __init__(self, compiled: Callable[..., Any], ranks: Ranks, more: list[torch.Tensor]) -> None:
        self.compiled = compiled
        self.ranks = ranks
        self.more = more

    def __call__(self, *args: Any) -> Any:
        self.ranks.refuse_if_over()
        try:
            return self.compiled(*args, *self.more)
        except Exception as error:
            if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
                self.ranks.end(f"an exchange was broken off on this rank ({type(error).__name__}: {error})")
                raise DistributedError(
                    "another rank failed, left or did not answer in time during an exchange; the error that it raised says why"
                ) from error
            raise
