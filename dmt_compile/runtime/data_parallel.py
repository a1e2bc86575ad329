"""The graphs of both modes as one module, checked before and after it runs, and the averaging of its dense gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..graphs import attribute_of, resolve_parameter
from ..stage import Stage
from ..verify.deal import Layout, check_batch
from .announce import announce_success
from .base import RankContext
from .gradients import guard_result
from .groups import TowerGroups
from .tower_sync import copy_from_first


class ByMode(nn.Module):
    """The graph for training and the one for evaluation as one module, over the rank's own parameters and buffers.

    Batches are checked in here, because DistributedDataParallel may already have spoken with the other ranks when it calls this: a
    rank must not raise before it. Where the graph exchanges nothing (``flat``), the ranks tell each other behind it that all have
    come so far.
    """

    def __init__(
        self,
        graphs: Mapping[bool, fx.GraphModule],
        layouts: Mapping[bool, Layout],
        context: RankContext,
        flat: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._layouts = layouts
        self._context = context
        self._flat = flat
        some = graphs[True]
        for key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[key] = some.__dict__[key]
        self.graphs = graphs
        self.training = some.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check_batch(args, kwargs, self._layouts[self.training])
        result = self.graphs[self.training](*args, **kwargs)
        if self._flat is not None:
            announce_success(self._context, self._flat)
            if self._context.sums_in_backward:
                guard_result(result, self._context)
        return result


def compiled(stages: Mapping[bool, Stage], context: RankContext, groups: TowerGroups, layouts: Mapping[bool, Layout]) -> ByMode:
    """The lowered graphs with this rank's modules and process groups."""
    names = groups.names()
    training = evaluating = stages[True].bind(context).compile(names, f"Rank{context.rank}")
    if stages[False] is not stages[True]:
        evaluating = stages[False].bind(context).compile(names, f"Rank{context.rank}Evaluating")
    flat = None if stages[True].lookups.lookups else groups.world
    return ByMode({True: training, False: evaluating}, layouts, context, flat)


def synchronised(module: ByMode, tables: set[int], group: ProcessGroup, find_unused: bool) -> nn.Module:
    """``module`` with dense gradients averaged over ``group``; parameters that no graph ever reads are left alone.

    ``tables`` are what not all ranks hold, the tensors of a tower's module too. Everything else starts with rank 0's values, frozen
    parameters, buffers and the constants of the graphs too.
    """
    shared = {id(t): t for t in (*module.parameters(), *module.buffers(), *_constants(module))}
    copy_from_first([t for place, t in shared.items() if place not in tables], group, module._context.device)
    in_training, in_evaluation = (_used_parameters(module.graphs[mode]) for mode in (True, False))
    skipped = tables | ({id(p) for p in module.parameters()} - in_training - in_evaluation)
    if not any(p.requires_grad for p in module.parameters() if id(p) not in skipped):
        return module
    # A tied parameter is skipped under each of its names.
    ignored = [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in skipped]
    # To it, a parameter of the outermost module is called both "name" and ".name".
    ignored += [f".{name}" for name in ignored if "." not in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return DistributedDataParallel(
        module,
        process_group=group,
        forward_sync_buffers=False,
        init_sync=False,
        # Otherwise it would wait for the gradients of what only the other mode reads.
        find_unused_parameters=find_unused or in_training - tables != in_evaluation - tables,
        gradient_as_bucket_view=True,
    )


def _constants(module: ByMode) -> Iterator[torch.Tensor]:
    """Tensors that the graphs read from attributes."""
    for mode in (True, False):
        graph = module.graphs[mode]
        for target in dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "get_attr"):
            value = attribute_of(graph, target)
            if isinstance(value, torch.Tensor):
                yield value


def _used_parameters(module: fx.GraphModule) -> set[int]:
    used: set[int] = set()
    for node in module.graph.nodes:
        if node.op == "call_module":
            used.update(id(p) for p in module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            owner, attribute = resolve_parameter(module, str(node.target))
            used.add(id(getattr(owner, attribute)))
    return used
