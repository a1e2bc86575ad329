"""Giving values to parameters on the meta device: a rank allocates what it owns, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..errors import DistributedError
from ..lookups import LookupSet

Narrow = Callable[[Any], nn.Parameter]
"""A whole parameter in, the part of it that a rank keeps out."""


def materialize(root: nn.Module, lookups: LookupSet, device: torch.device, narrow: Mapping[int, Narrow]) -> None:
    """Allocate every meta tensor left in ``root`` on ``device`` and initialise it as its module's class does.

    ``narrow`` says, by the identity of a meta parameter, what to keep of it: an initialisation may depend on the whole shape, so
    the whole is there for as long as that takes.

    Raises:
        DistributedError: a module has meta tensors and no ``reset_parameters`` to fill them; names them.
    """
    fresh: dict[int, torch.Tensor] = {}
    unfilled: list[str] = []
    for path, module in root.named_modules():
        loose = [name for name, value in module.__dict__.items() if isinstance(value, torch.Tensor) and value.is_meta]
        originals = dict(module._parameters)
        names = [*_allocate(module._parameters, fresh, device), *_allocate(module._buffers, fresh, device)]
        reset = getattr(module, "reset_parameters", None)
        if names and callable(reset):
            reset()
            for name, original in originals.items():
                if id(original) in narrow:
                    kept = narrow[id(original)](module._parameters[name])
                    fresh[id(original)] = module._parameters[name] = kept
        else:
            loose += names
        unfilled.extend(f"{path}.{name}" if path else name for name in loose)
    if unfilled:
        raise DistributedError(
            f"nothing says how to fill {', '.join(map(repr, unfilled[:4]))} (on the meta device): create the module that holds "
            "it on a real device, or give its class a reset_parameters() method"
        )
    made = {id(tensor) for tensor in fresh.values()}
    parameters = dict(root.named_parameters())
    for table in lookups.tables:
        if id(parameters.get(table.parameter)) in made and len(lookups.shards[table.parameter]) == 1:
            torchrec_adapter.initialise(root, table)


def _allocate(
    tensors: dict[str, torch.Tensor | None] | dict[str, nn.Parameter | None],
    fresh: dict[int, torch.Tensor],
    device: torch.device,
) -> list[str]:
    names = []
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_meta:
            if id(tensor) not in fresh:
                made = torch.empty_like(tensor, device=device)
                fresh[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            tensors[name] = fresh[id(tensor)]  # type: ignore[assignment]
            names.append(name)
    return names
