"""State dicts and gradient norms of a model whose tables are used and updated on their owners only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import DistributedError
from .owners import RANKS, owner_of
from .start import alone


def _world() -> int:
    return 1 if alone() else dist.get_world_size()


def _owner(value: Any) -> int | None:
    """The rank that owns a table; None for any other value, and where there is one rank."""
    rank = owner_of(value, _world()) if isinstance(value, torch.Tensor) else None
    return rank if _world() > 1 else None


def _plain(model: nn.Module) -> nn.Module:
    """The user's module, which ``torch.compile`` may have wrapped."""
    return getattr(model, "_orig_mod", model)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model compiled with ``backend="dmt"``, every table as its owner has it; the same on every rank.

    A collective call over the ranks that train the model. Keys are those of the model itself; tensors are copies.

    Raises:
        DistributedError: Dynamo has left all of the model to Python, or a parameter that all ranks hold is not the same on all of
            them, which is what comes of code that was not compiled.
    """
    _refuse_uncompiled(_plain(model))
    result: dict[str, Any] = {}
    copies: dict[int, torch.Tensor] = {}
    for name, value in _plain(model).state_dict(keep_vars=True).items():
        rank = _owner(value)
        if rank is None:
            result[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            continue
        if id(value) not in copies:
            own = rank == dist.get_rank()
            copy = value.detach().clone() if own else torch.empty(value.shape, dtype=value.dtype, device=value.device)
            dist.broadcast(copy, src=rank)
            copies[id(value)] = copy
        result[name] = copies[id(value)]
    return result


def _refuse_uncompiled(model: nn.Module) -> None:
    if alone():
        return
    kept = [ranks.kept for ranks in RANKS.values()]
    if not any(_owner(one) is not None or any(one in tables for tables in kept) for one in model.parameters()):
        raise DistributedError(
            "backend 'dmt' has compiled no graph in which this model looks a table up: call the model first, and see "
            "dmt_compile.explain(...) for what Dynamo leaves to Python (torch.compile(..., fullgraph=True) makes an error of it)"
        )
    device = next(model.parameters()).device
    shared = [(name, parameter) for name, parameter in model.named_parameters() if _owner(parameter) is None]
    sums = torch.stack([_digest(parameter) for _, parameter in shared]) if shared else torch.zeros(0, 2, device=device)
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    differ = [name for (name, _), low, high in zip(shared, least, most, strict=True) if not torch.equal(low, high)]
    if differ:
        raise DistributedError(
            f"{', '.join(differ[:8])}{', ...' if len(differ) > 8 else ''}: not the same on all ranks. Build the same model on "
            "every rank (seed it alike), change parameters with the optimizer only, and see that Dynamo compiles all that uses them"
        )


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    """Two numbers that differ where the bits of parameters do, but for the rarest of cases."""
    own = parameter.detach().reshape(-1).contiguous().view(torch.uint8).to(torch.float64)
    places = torch.arange(1, own.numel() + 1, device=own.device, dtype=torch.float64)
    return torch.stack([own.sum(), (own * torch.frac(places * 0.6180339887498949)).sum()])


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load what :func:`full_state_dict`, or the flat model, has given; each rank takes the tables that it owns.

    Raises:
        DistributedError: keys are missing, or there are others.
    """
    plain = _plain(model)
    own = plain.state_dict(keep_vars=True)
    missing, unexpected = [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
    if missing or unexpected:
        raise DistributedError(f"the state dict lacks {missing[:8]} and has {unexpected[:8]}, which the model has not")
    kept = {}
    for name, value in own.items():
        rank = _owner(value)
        if rank is None or rank == dist.get_rank():
            kept[name] = state_dict[name]
    plain.load_state_dict(kept, strict=False)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` over the whole model, all ranks' tables included; a collective call.

    torch's own would see this rank's tables only, and scale what all ranks hold by another factor on each.
    """
    parameters = [parameter for parameter in _plain(model).parameters() if parameter.grad is not None]
    owned = [parameter for parameter in parameters if _owner(parameter) is not None]
    ids = {id(parameter) for parameter in owned}
    shared = [parameter for parameter in parameters if id(parameter) not in ids]
    parts = []
    if not alone():
        device = next(_plain(model).parameters()).device
        norms = torch.zeros(dist.get_world_size(), device=device)
        norms[dist.get_rank()] = nn.utils.get_total_norm(_gradients(owned), norm_type) if owned else 0.0
        dist.all_reduce(norms)
        parts = list(norms.unbind())
    else:
        shared += owned
    if shared:
        parts.append(nn.utils.get_total_norm(_gradients(shared), norm_type))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else torch.zeros(())
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
