"""Identities on the way forward that change what flows back."""

from __future__ import annotations

from typing import Any

import torch


def scale_gradient(x: torch.Tensor, times: float, by: float) -> torch.Tensor:
    """``x``, whose gradient is multiplied by ``times`` and divided by ``by``: a division keeps whole numbers whole."""
    scaled: torch.Tensor = _Scale.apply(x, times, by)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return scaled


def tie(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x``, with ``other`` made part of its history: what comes before ``other`` runs backward on every rank that has ``x``."""
    tied: torch.Tensor = _Tie.apply(x, other)  # type: ignore[no-untyped-call]  # torch does not annotate apply
    return tied


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
        return grads[0], torch.zeros(shape, dtype=dtype, device=device)
