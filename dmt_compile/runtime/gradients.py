"""Identities on the way forward that change what flows back."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DistributedError
from ..nested import take_apart
from .base import RankContext


def scale_gradient(x: torch.Tensor, times: float, by: float) -> torch.Tensor:
    """``x``, whose gradient is multiplied by ``times`` and divided by ``by``: a division keeps whole numbers whole."""
    scaled: torch.Tensor = _Scale.apply(x, times, by)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return scaled


def tie(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x``, with ``other`` made part of its history: what comes before ``other`` runs backward on every rank that has ``x``."""
    tied: torch.Tensor = _Tie.apply(x, other)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return tied


def guard(x: torch.Tensor, context: RankContext) -> torch.Tensor:
    """``x``, whose backward fails when the averaging of dense gradients does not await one any more.

    DistributedDataParallel averages in the first backward after a forward only; a second one would leave gradients that
    differ between ranks, without a word.
    """
    guarded: torch.Tensor = _Guard.apply(x, context)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return guarded


def guard_result(result: Any, context: RankContext) -> None:
    """As :func:`guard`, for the tensors of a model's result, which stay the tensors that they are."""

    def refuse(gradient: torch.Tensor) -> None:
        _close_after_backward(context)

    for tensor in take_apart(result)[0]:
        # A hook on a leaf would stay on it.
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(refuse)


def _close_after_backward(context: RankContext) -> None:
    """Called in a backward, which is the one that the averaging of dense gradients awaits.

    Raises:
        DistributedError: it awaits none.
    """
    if not context.open:
        raise DistributedError(
            "a second backward since the last forward: dense gradients are averaged over the ranks in the first one only; "
            "add the losses up and call backward once, or run all but the last forward and backward under no_sync()"
        )

    def close() -> None:
        context.open = False

    # At the end of this backward, which may run through several forwards.
    torch.autograd.Variable._execution_engine.queue_callback(close)


class _Guard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: RankContext) -> torch.Tensor:
        ctx.context = context
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        _close_after_backward(ctx.context)
        return grads[0], None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: float, by: float) -> torch.Tensor:
        ctx.scale = (times, by)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        times, by = ctx.scale
        return grads[0] * times / by, None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.like = (other.shape, other.dtype, other.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        # Where nothing else comes back, this is all there is; it needs no memory.
        return grads[0], torch.zeros((), dtype=dtype, device=device).expand(shape)
