"""Comparing nested outputs and gradients, bit for bit or to a tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..adapters import torchrec as torchrec_adapter


def tensors_in(value: Any, where: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested outputs, with the path to it."""
    if isinstance(value, torch.Tensor):
        yield where, value
        return
    inside = torchrec_adapter.tensors_of(value)
    if inside is not None:
        for name, tensor in inside.items():
            yield f"{where}.{name}", tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{where}.{field.name}")


def bits_differ(found: Any, expected: Any) -> str | None:
    """The first place where two nested outputs are not the same bits; None if they are. NaN equals NaN."""
    mine, theirs = dict(tensors_in(found)), dict(tensors_in(expected))
    if mine.keys() != theirs.keys():
        return f"different structure: {sorted(mine.keys() ^ theirs.keys())[:3]}"
    for where, tensor in mine.items():
        other = theirs[where]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return f"{where}: {tuple(tensor.shape)} {tensor.dtype} against {tuple(other.shape)} {other.dtype}"
        same = (tensor == other) | (tensor != tensor) & (other != other)
        if not bool(same.all()):
            index = tuple((~same).nonzero()[0].tolist())
            return f"{where}{list(index)}: {tensor[index].item()!r} against {other[index].item()!r}"
    return None


def tolerance(dtype: torch.dtype, sums: int = 1) -> float:
    """Allowed difference, relative to the largest magnitude in the tensor.

    Gradients are sums over samples; the flat model adds up per rank and then over ranks, an owner adds all samples in one run.
    Each order is off by at most a few rounding steps per term, and the terms' errors do not all point one way: 128 units in
    the last place cover sums of tens of thousands of terms.
    """
    return 128 * sums * torch.finfo(dtype).eps


def furthest(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> tuple[float, str]:
    """The largest difference of any pair, relative to the expected tensor's largest magnitude and to the tolerance of its type.

    A result of at most 1 is within tolerance. A missing tensor equals zeros. A gradient that is zero in exact arithmetic (a bias
    before a softmax, what goes into the batch norm of two samples) is nothing but rounding of terms that cancel, so each may
    also be off by 32 units in the last place of the largest gradient of all.
    """
    floor = 32 * _common_scale(expected.values())
    ratios: dict[str, float] = {}
    for key in expected.keys() | found.keys():
        a, b = found.get(key), expected.get(key)
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None and b is not None
        allowed = tolerance(a.dtype) * _largest(b.detach().double()) + (floor * torch.finfo(a.dtype).eps).to(b.device)
        ratios[key] = _ratio(a, b, allowed)
    return _worst(ratios)


def furthest_change(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """As :func:`furthest`, for the changes of tensors since ``start``.

    An update is added to a value that may be far larger than it, so each may be off by four units in the last place of the
    value on top of the tolerance for the update, and by 32 of the largest update of all. That is too little to hide an update
    that is missing or scaled.
    """
    floor = 32 * _common_scale(expected[key].detach().double() - was.detach().double() for key, was in start.items())
    ratios: dict[str, float] = {}
    for key, was in start.items():
        before, after = was.detach().double(), expected[key].detach().double()
        if not was.dtype.is_floating_point:
            ratios[key] = 0.0 if torch.equal(found[key], expected[key]) else float("inf")
            continue
        units = 4 * torch.maximum(before.abs(), after.abs()) + floor.to(was.device)
        rounding = torch.finfo(was.dtype).eps * units
        ratios[key] = _ratio(found[key], expected[key], tolerance(was.dtype) * _largest(after - before) + rounding)
    return _worst(ratios)


def _common_scale(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The largest finite magnitude in any of ``tensors``."""
    sizes = [_largest(tensor.detach().double()).cpu() for tensor in tensors if tensor is not None]
    return torch.stack(sizes).max() if sizes else torch.zeros((), dtype=torch.float64)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude, 0 if there is none."""
    return torch.where(x.isfinite(), x, 0.0).abs().max() if x.numel() else x.new_zeros(())


def _ratio(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest difference as a multiple of ``allowed``; NaN and infinities differ from everything but themselves."""
    if a.numel() == 0:
        return 0.0
    a64, b64 = a.detach().double(), b.detach().double()
    same = (a64 == b64) | (a64 != a64) & (b64 != b64)
    ratio = (a64 - b64).abs() / allowed.clamp(min=torch.finfo(a.dtype).tiny)
    return float(torch.where(same, 0.0, ratio.nan_to_num(nan=float("inf"), posinf=float("inf"))).max())


def _worst(ratios: Mapping[str, float]) -> tuple[float, str]:
    name = max(ratios, key=lambda key: ratios[key], default="")
    return (ratios[name], name) if name and ratios[name] > 0 else (0.0, "")
