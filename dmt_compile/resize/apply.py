"""Layers of other sizes, made as their class makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, first_line
from ..graphs import clone_with_parameters
from .symbols import sizes_kept


def apply_sizes(
    root: nn.Module, shapes: Mapping[str, tuple[int, ...]], norms: Mapping[str, tuple[int, ...]], seed: int
) -> dict[str, str]:
    """Give parameters and buffers of ``root``, a clone that shares its tensors, other shapes; these are drawn again, no others.

    ``norms`` are the shapes of norms without parameters, by the names of these modules.

    A tensor of a module whose class has ``reset_parameters()`` becomes what that draws. One of a module without it stays what it is
    where all its values are the same (zeros, ones), else it is drawn from a normal distribution whose spread follows the old one's
    as that of Xavier's or Kaiming's would: with the root of its number of inputs and outputs. All are drawn from ``seed``.

    Returns why the class could not draw them, by the name of the module, where its ``reset_parameters`` does not work with their
    sizes: these are drawn as those of a module without it.

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
    touched: list[tuple[str, nn.Module]] = []
    for path, module in root.named_modules():
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
            touched.append((path, module))
    for _, module in touched:
        for name, size in sizes_kept(module).items():
            setattr(module, name, size)
    own = {id(tensor) for tensor in made.values()}
    undrawn = {}
    # A module draws after its children, as when it is made.
    for number, (path, module) in reversed(list(enumerate(touched))):
        why = _drawn_by_class(module, own, seed + number)
        if why:
            undrawn[path] = why
    return undrawn


def _drawn_by_class(module: nn.Module, own: set[int], seed: int) -> str:
    """Let the class of a module draw the tensors ``own`` in it; why it cannot."""
    method = next((name for name in ("reset_parameters", "_reset_parameters") if callable(getattr(type(module), name, None))), None)
    mine = {name: tensor for name, tensor in _tensors(module).items() if id(tensor) in own}
    if method is None or method in vars(module) or any(tensor.is_meta for tensor in mine.values()):
        return ""
    try:
        # Its method may write to whatever the module holds, and all but a few of these tensors are those of the flat model.
        copy = clone_with_parameters(module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            getattr(copy, method)()
    except Exception as error:
        return f"{type(module).__name__}.{method}() raises {first_line(error)}"
    drawn = _tensors(copy)
    for name, tensor in mine.items():
        if name not in drawn or drawn[name].shape != tensor.shape:
            got = tuple(drawn[name].shape) if name in drawn else "nothing"
            return f"{type(module).__name__}.{method}() makes {got} of '{name}', not {tuple(tensor.shape)}"
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(drawn[name])
    return ""


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))


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
