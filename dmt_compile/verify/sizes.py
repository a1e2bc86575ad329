"""The shapes that a stage's graph records, against those of the values that flow through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..errors import at
from ..runtime.pooled import MakeOutput
from ..shapes import SHAPE, agrees, text
from ..stage import PASS, Stage


@dataclass
class SizesSeen:
    """Watches runs of stages on all ranks: the shapes of all tensors, by stage and by (rank, name of the node)."""

    of: dict[str, dict[tuple[int, str], tuple[int, ...]]] = field(default_factory=dict)

    def watch(self, stage: str) -> Any:
        """What :func:`simulate` is to call while it runs that stage."""
        seen = self.of.setdefault(stage, {})

        def see(rank: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and not value.is_nested:
                seen[rank, node.name] = tuple(value.shape)

        return see


def wrong_size(
    stages: Mapping[str, Stage], seen: SizesSeen, batches: Sequence[int], reference: str = "flat"
) -> tuple[int, int, str | None]:
    """How many recorded shapes were compared, how many depend on the data, and the first that is not what is there.

    A tensor's shape must be that of the stage ``reference`` on the same samples, and the recorded one. Where that stage's own is
    not the recorded one, the example inputs did not show that it depends on the values of the inputs, and nothing is wrong.
    """
    compared: set[str] = set()
    free: set[str] = set()
    for name, found in seen.of.items():
        stage = stages[name]
        for node in stage.graph.nodes:
            shape = node.meta.get(SHAPE)
            if shape is None:
                continue
            flat = _flat_name(stage, node)
            for rank, batch in enumerate(batches):
                here, there = found.get((rank, node.name)), seen.of[reference].get((rank, flat))
                if here is None or there is None:
                    continue
                where = f"pass '{node.meta.get(PASS, 'capture')}', stage '{name}', rank {rank}: {at(node)}"
                if here != there:
                    return len(compared), len(free), f"{where} is of shape {here}, in the {_MODELS[reference]} of {there}"
                (compared if agrees(shape, here, batch) else free).add(f"{flat}: {text(shape)}")
    return len(compared - free), len(free), None


_MODELS = {"flat": "flat model", "model": "tower model"}


def _flat_name(stage: Stage, node: fx.Node) -> str:
    module = stage.module(node) if node.op == "call_module" else None
    return module.output.node if isinstance(module, MakeOutput) else node.name
