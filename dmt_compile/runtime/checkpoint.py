"""A rank's state dicts: other ranks' tables left out, and the rows of a table that several ranks hold in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..lookups import Table
from .shards import RowShards, cut_rows

if TYPE_CHECKING:
    from .rank_module import RankModule


def shared_tables(module: RankModule) -> dict[str, list[Table]]:
    """By parameter, this rank's tables of every parameter that other ranks hold tables of too."""
    found: dict[str, list[Table]] = {}
    for name in module.context.bases:
        table = module.lookups.table[name]
        found.setdefault(table.parameter, []).append(table)
    return found


def own_rows(module: RankModule, value: torch.Tensor, table: Table) -> torch.Tensor:
    """The rows of one of this rank's tables, in a tensor laid out as its parameter is."""
    base = module.context.bases.get(table.name, table.start)
    return value[base : base + table.rows]


def _as_shards(module: RankModule, value: torch.Tensor, parameter: str, tables: list[Table]) -> RowShards:
    whole = module.lookups.shards[parameter]
    parts = {table.start: own_rows(module, value, table) for table in tables}
    return RowShards((whole[-1].end, *value.shape[1:]), parts)


def take_own_rows(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, meta: Any, strict: bool, missing: Any, other: Any, errors: list[str]
) -> None:
    """Let a rank load the flat model's state dict: tables of other ranks are not its business."""
    rank_module: Any = module
    context, shared = rank_module.context, shared_tables(rank_module)
    for key in context.foreign:
        state_dict.pop(prefix + key, None)
    for key in (*shared, *context.aliases):
        parameter = context.aliases.get(key, key)
        value = state_dict.get(prefix + key)
        if parameter not in shared or not isinstance(value, torch.Tensor):
            continue
        whole = rank_module.lookups.shards[parameter]
        shape = (whole[-1].end, whole[0].dim)
        if tuple(value.shape) == shape:
            state_dict[prefix + key] = cut_rows(value, shared[parameter], key)
        else:
            errors.append(f"size mismatch for {key}: the state dict has {tuple(value.shape)}, the table is {shape}.")
            state_dict[prefix + key] = module.get_parameter(parameter).detach()


def show_whole_tables(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give a table that several ranks hold together its own shape in the state dict, with this rank's rows."""
    rank_module: Any = module
    context, shared = rank_module.context, shared_tables(rank_module)
    for key in (*shared, *context.aliases):
        parameter = context.aliases.get(key, key)
        if parameter in shared and prefix + key in state_dict:
            value = module.get_parameter(parameter).detach()
            state_dict[prefix + key] = _as_shards(rank_module, value, parameter, shared[parameter])


def optimizer_state(module: RankModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """See :meth:`RankModule.optimizer_state_dict`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    # By parameter and not by group: the groups of two ranks list other parameters, and a checkpoint would keep one rank's.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=options)
    for parameter, tables in shared_tables(module).items():
        rows = len(module.get_parameter(parameter))
        for key, value in _of_parameter(state, parameter):
            if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows:
                state[key] = _as_shards(module, value, parameter, tables)
    return state


def load_optimizer_state(module: RankModule, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """See :meth:`RankModule.load_optimizer_state_dict`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state = dict(state_dict)
    for parameter, tables in shared_tables(module).items():
        for key, value in _of_parameter(state, parameter):
            if isinstance(value, RowShards):
                state[key] = cut_rows(value, tables, key)
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(flatten_optimizer_state_dict=True))


def _of_parameter(state: dict[str, Any], parameter: str) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in state.items() if key.startswith(f"state.{parameter}.")]
