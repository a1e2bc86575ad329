"""Tower modules beside the tables: they must be where these are, and take and make vectors of their type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import PlanError, first_line
from .modules import PassedVectors

_ROWS = 3


def refuse_places(module: nn.Module, device: torch.device, where: str, *, moves: bool) -> None:
    """A module must have values where the tables have some, and unless it ``moves`` must be where they are.

    Raises:
        PlanError: it has not; ``where`` begins the error.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and device.type != "meta":
            raise PlanError(
                f"{where}: '{name}' of {type(module).__name__} is on the meta device, without values, but the tables are on "
                f"{device}: make it on a device (outside torch.device('meta')), or move it with to_empty() and draw its values"
            )
        if not moves and tensor.device != device:
            raise PlanError(
                f"{where}: '{name}' of {type(module).__name__} is on {tensor.device}, but the tables are on {device}: move it there"
            )


def refuse_types(module: nn.Module, widths: Sequence[int], dtype: torch.dtype, where: str) -> None:
    """Try a module on vectors of the tables' type.

    What it raises on vectors of its own parameters' type too is left to the trial of what it makes.

    Raises:
        PlanError: it does not take them, or makes others; ``where`` begins the error.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    if isinstance(module, PassedVectors) or any(tensor.is_meta for tensor in tensors):
        return
    own = next(module.parameters(), torch.empty(0, dtype=torch.float32))
    shape = (_ROWS, len(widths), widths[0]) if len(set(widths)) == 1 else (_ROWS, sum(widths))
    rows = torch.ones(shape, dtype=dtype, device=own.device)
    held = sorted({str(tensor.dtype) for tensor in tensors if tensor.dtype != dtype})
    advice = f"it holds {', '.join(held)}: move it with module.to({dtype})" if held else _PLAIN
    was = {child: child.training for child in module.modules()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            made = module.eval()(rows)
        except Exception as error:
            if own.dtype == dtype:
                return
            raise PlanError(
                f"{where}: {type(module).__name__} does not take vectors of {dtype}, the type of the tables ({first_line(error)}); "
                f"{advice}"
            ) from error
        finally:
            for child, training in was.items():
                child.training = training
    if isinstance(made, torch.Tensor) and made.dtype != dtype:
        raise PlanError(
            f"{where}: {type(module).__name__} takes {dtype} and returns {made.dtype}, but rows travel in the type of the tables; "
            f"{advice}"
        )


_PLAIN = "keep its tensors as parameters or buffers, whose type is changed with the module's, or cast what it makes to x.dtype"
