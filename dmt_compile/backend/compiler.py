"""The backend that torch.compile calls with every graph that Dynamo makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ..errors import DistributedError
from .averaging import broken_off, module_on_stack
from .options import Options
from .overlap import during_longest_exchange
from .runner import Runner
from .staging import one_device_graph, rank_graph
from .start import alone, begin, ranks_for

_ALONE = (
    "backend 'dmt': there is one rank (no process group of several), so nothing is exchanged: the lookups of all towers run on "
    "this device"
)
_warned = False


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
    if alone():
        if not _warned:
            warnings.warn(_ALONE, stacklevel=2)
            _warned = True
        return inner(one_device_graph(module, given), example_inputs)
    if torch.nn.parallel.distributed.DistributedDataParallel._get_active_ddp_module() is not None:
        raise DistributedError(
            "the model is wrapped in DistributedDataParallel, which averages the gradients of tables that only their owners have: "
            "compile the model itself; backend 'dmt' averages the gradients of all else"
        )
    try:
        ranks = ranks_for(given)
    except RuntimeError as error:
        if broken_off(error):
            raise DistributedError("another rank failed or left before it compiled this model; its own error says why") from error
        raise
    # What it has compiled too often, Dynamo leaves to Python, which would look rows up in tables that their owners have changed.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    model = module_on_stack()
    try:
        if model is not None:
            begin(model, ranks)
        made = rank_graph(module, given, ranks, model)
        _allow_sizes_from_data()
        if given.inner == "inductor":
            inner = partial(inner, config_patches=_INDUCTOR)
        more = [ranks.averages.of(model).anchor] if made.anchored else []
        return Runner(inner(made.module, [*example_inputs, *more]), made, ranks, given.free_unowned)
    except torch._dynamo.exc.RestartAnalysis:
        # Dynamo will call again.
        raise
    except Exception as error:
        if broken_off(error):
            raise ranks.lost(error) from error
        # The others may have compiled theirs, and would wait for this rank.
        first = str(error).strip().partition("\n")[0]
        ranks.end(f"a graph could not be compiled on this rank ({type(error).__name__}: {first})")
        raise


# Exchanges begin as soon as what they send is there; inductor would else put each beside its wait. Its cache of graphs must not be
# used: a compiled graph names steps and process groups of this process.
_INDUCTOR = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", during_longest_exchange],
}


def _inner(options: Options) -> Callable[..., Any]:
    if callable(options.inner):
        return options.inner
    found: Callable[..., Any] = torch._dynamo.lookup_backend(options.inner)
    return found


def _allow_sizes_from_data() -> None:
    """How many ids another rank sends is known when they come: such sizes are symbols in the compiled graph."""
    context = torch._guards.TracingContext.try_get()
    fake = context.fake_mode if context is not None else None
    if fake is not None and fake.shape_env is not None:
        env = fake.shape_env
        env.settings = replace(env.settings, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
