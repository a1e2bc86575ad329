"""A rank's state dicts: other ranks' tables left out, and the rows of a table that several ranks hold in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import DistributedError
from ..lookups import LookupSet, Table
from .base import RankContext
from .shards import RowShards, cut_rows


def _shared_tables(context: RankContext, lookups: LookupSet) -> dict[str, list[Table]]:
    """By parameter, this rank's tables of every parameter that other ranks hold tables of too."""
    found: dict[str, list[Table]] = {}
    for name in context.bases:
        table = lookups.table[name]
        found.setdefault(table.parameter, []).append(table)
    return found


def own_rows(context: RankContext, value: torch.Tensor, table: Table) -> torch.Tensor:
    """The rows of one of this rank's tables, in a tensor laid out as its parameter is."""
    base = context.bases.get(table.name, table.start)
    return value[base : base + table.rows]


def _as_shards(context: RankContext, lookups: LookupSet, value: torch.Tensor, tables: list[Table]) -> RowShards:
    whole = lookups.shards[tables[0].parameter]
    return RowShards((whole[-1].end, *value.shape[1:]), {table.start: own_rows(context, value, table) for table in tables})


def take_own_rows(
    context: RankContext,
    lookups: LookupSet,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    meta: Any,
    strict: bool,
    missing: Any,
    other: Any,
    errors: list[str],
) -> None:
    """Let a rank load the flat model's state dict: tables of other ranks are not its business."""
    shared = _shared_tables(context, lookups)
    for key in context.foreign:
        state_dict.pop(prefix + key, None)
    for key in (*shared, *context.aliases):
        parameter = context.aliases.get(key, key)
        value = state_dict.get(prefix + key)
        if parameter not in shared or not isinstance(value, torch.Tensor):
            continue
        whole = lookups.shards[parameter]
        shape = (whole[-1].end, whole[0].dim)
        if tuple(value.shape) == shape:
            state_dict[prefix + key] = cut_rows(value, shared[parameter], key)
        else:
            errors.append(f"size mismatch for {key}: the state dict has {tuple(value.shape)}, the table is {shape}.")
            state_dict[prefix + key] = context.root.get_parameter(parameter).detach()


def show_whole_tables(
    context: RankContext, lookups: LookupSet, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Give a table that several ranks hold together its own shape in the state dict, with this rank's rows."""
    shared = _shared_tables(context, lookups)
    for key in (*shared, *context.aliases):
        parameter = context.aliases.get(key, key)
        if parameter in shared and prefix + key in state_dict:
            value = context.root.get_parameter(parameter).detach()
            state_dict[prefix + key] = _as_shards(context, lookups, value, shared[parameter])


def optimizer_state(
    module: nn.Module, context: RankContext, lookups: LookupSet, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """See :meth:`RankModule.optimizer_state_dict`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    # By parameter and not by group: the groups of two ranks list other parameters, and a checkpoint would keep one rank's.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=options)
    for parameter, tables in _shared_tables(context, lookups).items():
        rows = sum(table.rows for table in tables)
        for key, value in _of_parameter(state, parameter):
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows:
                state[key] = _as_shards(context, lookups, value, tables)
    return state


def load_optimizer_state(
    module: nn.Module, context: RankContext, lookups: LookupSet, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """See :meth:`RankModule.load_optimizer_state_dict`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if optimizer.state and not any(key.startswith("state.") for key in state_dict):
        raise DistributedError(
            "the optimizer's state dict holds no state: optimizer_state_dict() gives that of an optimizer that has not stepped yet "
            "only while there are no gradients, so call zero_grad() before it"
        )
    state = dict(state_dict)
    for parameter, tables in _shared_tables(context, lookups).items():
        for key, value in _of_parameter(state, parameter):
            if isinstance(value, RowShards):
                state[key] = cut_rows(value, tables, key)
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(flatten_optimizer_state_dict=True))


def _of_parameter(state: dict[str, Any], parameter: str) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in state.items() if key.startswith(f"state.{parameter}.")]
