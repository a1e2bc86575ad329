"""Outputs of a program whose towers' modules run on the rows of peers: what these make to a tolerance, all else bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ..runtime.tower_rows import TowerColumns
from ..runtime.vectors import FlatColumns
from ..stage import Stage
from .cluster import Watch
from .compare import tensors_in

Columns = list[dict[str, torch.Tensor]]
"""By rank, what each tower has made for the rank's own samples, by the name of the node that has it."""


def column_nodes(stage: Stage) -> list[str]:
    """The names of the nodes that hold what each tower has made for a rank's own samples."""
    calls = [node for node in stage.graph.nodes if node.op == "call_module"]
    return [node.name for node in calls if isinstance(stage.module(node), TowerColumns | FlatColumns)]


def watch_columns(stage: Stage, columns: Columns, also: Watch | None = None) -> Watch:
    """What :func:`simulate` is to call, so that ``columns`` get the values of these nodes."""
    names = set(column_nodes(stage))

    def see(rank: int, node: fx.Node, value: Any) -> None:
        if also is not None:
            also(rank, node, value)
        if node.name in names:
            columns[rank][node.name] = value.detach().clone()

    return see


def by_tower(columns: Columns) -> dict[str, torch.Tensor]:
    """All ranks' samples one after the other: a rank of few samples says little about how large the columns are."""
    names = columns[0] if columns else {}
    return {name: torch.cat([own[name] for own in columns]) for name in names}


def largest_difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Of any number in the outputs, relative to the largest of its tensor over all ranks."""
    worst = 0.0
    mine, theirs = [dict(tensors_in(one)) for one in found], [dict(tensors_in(one)) for one in expected]
    for where, some in theirs[0].items():
        if not some.dtype.is_floating_point:
            continue
        pairs = [(a[where].double(), b[where].double()) for a, b in zip(mine, theirs, strict=True) if where in a and where in b]
        pairs = [(a, b) for a, b in pairs if a.shape == b.shape and a.numel() and not a.is_sparse]
        scale = max((float(b.abs().max()) for _, b in pairs), default=0.0)
        if scale > 0:
            worst = max(worst, max(float((a - b).abs().max()) for a, b in pairs) / scale)
    return worst


def towers_draw(root: nn.Module, stage: Stage) -> bool:
    """Whether any tower's module draws random numbers in the mode that it is in."""
    for record in stage.vectors:
        module = root.get_submodule(record.target)
        some = next(module.parameters(), None)
        dtype = stage.lookups.lookup[record.lookups[0]].dtype
        shape = (8, len(record.lookups), record.widths[0]) if record.equal_widths else (8, sum(record.widths))
        made = []
        with torch.no_grad(), torch.random.fork_rng():
            rows = torch.ones(shape, dtype=dtype, device=some.device if some is not None else None)
            for seed in (1, 2):
                torch.manual_seed(seed)
                before = torch.get_rng_state()
                made.append(module(rows))
                if not torch.equal(before, torch.get_rng_state()):
                    return True
        if not torch.equal(made[0], made[1]):
            return True
    return False
