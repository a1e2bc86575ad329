"""What forward computes outside the graph while it is traced, which a graph would keep for ever as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

_READS = ("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "equal", "allclose")
_DRAWS = ("rand", "bernoulli", "multinomial", "normal", "poisson", "dropout")


class Outside(TorchFunctionMode):
    """Notes tensors that are computed from parameters or buffers, or drawn at random, without the graph seeing it.

    Integer tables (offsets, index lists) may be looked at: they are constants in practice, and iterating over them is common.
    A single number in a buffer is a counter or a flag, which changes.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.paused = False
        self._state: dict[int, str] = {id(parameter): f"the parameter '{name}'" for name, parameter in root.named_parameters()}
        for name, buffer in root.named_buffers():
            if buffer.dtype.is_floating_point or buffer.dtype.is_complex or buffer.dim() == 0:
                self._state[id(buffer)] = f"the buffer '{name}'"
        # The tensors are kept, so that no other one gets their identity.
        self._made: dict[int, tuple[torch.Tensor, str]] = {}

    def origin(self, value: object) -> str | None:
        """What a tensor was computed from; None if a graph may hold it as a constant."""
        made = self._made.get(id(value))
        return made[1] if made is not None else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        name = getattr(func, "__name__", "")
        read = None
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor):
                read = self._state.get(id(value)) or self.origin(value)
                if read is not None:
                    break
        if read is None and any(word in name for word in _DRAWS):
            read = "random numbers"
        if read is None:
            return result
        if name in _READS:
            raise TypeError(f"forward looks at the value of {read} while it is traced, and the graph would keep what it saw")
        if name != "__get__":
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor) and id(value) not in self._state:
                    self._made[id(value)] = (value, read)
        return result
