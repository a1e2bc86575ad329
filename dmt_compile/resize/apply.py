"""Layers of other sizes, made as their class makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .symbols import sizes_kept


def apply_sizes(root: nn.Module, shapes: Mapping[str, tuple[int, ...]], norms: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Give parameters and buffers of ``root``, a clone, other shapes; the layers that hold them are drawn again.

    ``norms`` are the shapes of norms without parameters, by the names of these modules.

    A layer with ``reset_parameters()`` draws all its parameters itself. A parameter of a module without it stays what it is where
    all its values are the same (zeros, ones), else it is drawn from a normal distribution whose spread follows the old one's as
    that of Xavier's or Kaiming's would: with the root of its number of inputs and outputs. All are drawn from ``seed``.

    Raises:
        PlanError: one parameter has to become two shapes.
    """
    for name, shape in norms.items():
        norm: Any = root.get_submodule(name)
        norm.normalized_shape = shape
    by_identity: dict[int, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        tensor = _get(root, name)
        if by_identity.setdefault(id(tensor), shape) != shape:
            raise PlanError(f"'{name}' is one parameter under several names, which would have to become {shape} and another shape")
    made: dict[int, torch.Tensor] = {}
    touched: list[nn.Module] = []
    for module in root.modules():
        changed = False
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is None or id(tensor) not in by_identity:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _resized(tensor, by_identity[id(tensor)], seed, len(made))
                registry[name] = made[id(tensor)]
                changed = True
        if changed:
            touched.append(module)
    fresh = {id(tensor) for tensor in made.values()}
    for number, module in enumerate(touched):
        for name, size in sizes_kept(module).items():
            setattr(module, name, size)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset) and not any(p.is_meta for p in module.parameters(recurse=False)):
            # What keeps its shape is drawn again too, and must not be the original's; not all of it need be drawn.
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in fresh:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in fresh:
                    module._buffers[name] = buffer.detach().clone()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + number)
                reset()


def _get(root: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    value: torch.Tensor = getattr(root.get_submodule(path), attribute)
    return value


def _resized(tensor: torch.Tensor, shape: tuple[int, ...], seed: int, number: int) -> torch.Tensor:
    value = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if not tensor.is_meta and tensor.numel():
        old = tensor.detach()
        first = old.reshape(-1)[0]
        if bool((old == first).all()) or not old.is_floating_point():
            value.fill_(first.item())
        else:
            generator = torch.Generator(device=tensor.device).manual_seed(seed + number)
            spread = float(old.double().std(correction=0)) * math.sqrt(_fan(tuple(old.shape)) / max(_fan(shape), 1))
            value.normal_(0.0, spread, generator=generator)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _fan(shape: tuple[int, ...]) -> int:
    """Inputs and outputs of a matrix, or of several in one tensor; the elements of a vector."""
    return shape[-1] + shape[-2] if len(shape) > 1 else math.prod(shape)
