"""What a rank keeps of the model's tables: all of its own ones, and of a parameter that several ranks hold, its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..lookups import Table
from ..stage import Stage
from .materialize import Narrow
from .tower_sync import drop_other_towers


@dataclass(frozen=True)
class Pruned:
    """What became of the tables in a rank's module tree, by state-dict key.

    ``foreign`` are gone; ``aliases`` maps every further name of a table to its first one; ``bases`` says at which row of this
    rank's parameter a table begins; ``narrow`` cuts parameters that are still on the meta device, by identity.
    """

    foreign: frozenset[str]
    aliases: Mapping[str, str]
    bases: Mapping[str, int]
    narrow: Mapping[int, Narrow]


def prune(root: nn.Module, stage: Stage, rank: int) -> Pruned:
    """Remove other ranks' tables and other towers' modules from ``root``; of a parameter that several ranks hold, keep the rows of
    this rank's tables."""
    own = set(stage.plan.tables_of_rank[rank])
    shards = stage.lookups.shards
    first = {id(root.get_parameter(key)): key for key in shards}
    mine = {key: [table for table in tables if table.name in own] for key, tables in shards.items()}
    foreign = set(drop_other_towers(root, stage, rank))
    aliases: dict[str, str] = {}
    bases: dict[str, int] = {}
    narrow: dict[int, Narrow] = {}
    places: list[tuple[nn.Module, str, str]] = []
    # A module that is registered twice has its keys twice.
    for path, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            parameter_key = first.get(id(parameter))
            if parameter_key is None:
                continue
            key = f"{path}.{name}" if path else name
            if key != parameter_key:
                aliases[key] = parameter_key
            if not mine[parameter_key]:
                foreign.add(key)
            if len(mine[parameter_key]) < len(shards[parameter_key]):
                places.append((module, name, parameter_key))
    kept: dict[str, nn.Parameter] = {}
    for module, name, key in places:
        if not mine[key]:
            module._parameters.pop(name, None)
            continue
        parameter = module._parameters[name]
        assert parameter is not None
        if parameter.is_meta:
            narrow[id(parameter)] = partial(_keep_rows, tables=mine[key])
        else:
            if key not in kept:
                kept[key] = _keep_rows(parameter, mine[key])
            module._parameters[name] = kept[key]
        row = 0
        for table in mine[key]:
            bases[table.name] = row
            row += table.rows
    return Pruned(frozenset(foreign), aliases, bases, narrow)


def _keep_rows(parameter: nn.Parameter, tables: Sequence[Table]) -> nn.Parameter:
    rows = [parameter.detach()[table.start : table.end] for table in tables]
    return nn.Parameter(torch.cat(rows), requires_grad=parameter.requires_grad)
