"""Layers that turn sizes into plain numbers on the way, replaced by others that only have their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def replace_layers(root: nn.Module) -> None:
    """Put stand-ins in the place of attention and recurrent layers; ``root`` is a clone without values."""
    for module in list(root.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, nn.MultiheadAttention):
                module._modules[name] = _SizedAttention(child)
            elif isinstance(child, nn.RNNBase):
                module._modules[name] = _SizedRecurrent(child)


def _same(size: Any, other: Any) -> None:
    torch._check(size == other)


class _SizedAttention(nn.Module):
    """The sizes of ``nn.MultiheadAttention``."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        # What holds the layer may ask for its settings.
        return getattr(self.__dict__["layer"], name)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.layer
        width = query.shape[-1]
        for parameter, times in ((layer.in_proj_weight, 3), (layer.in_proj_bias, 3)):
            if parameter is not None:
                _same(parameter.shape[0], times * width)
        if layer.in_proj_weight is not None:
            for size in (layer.in_proj_weight.shape[1], key.shape[-1], value.shape[-1]):
                _same(size, width)
        else:
            _same(layer.q_proj_weight.shape[0], width)
            _same(layer.q_proj_weight.shape[1], width)
            for weight, given in ((layer.k_proj_weight, key), (layer.v_proj_weight, value)):
                _same(weight.shape[0], width)
                _same(weight.shape[1], given.shape[-1])
        for size in layer.out_proj.weight.shape:
            _same(size, width)
        if layer.out_proj.bias is not None:
            _same(layer.out_proj.bias.shape[0], width)
        if width % layer.num_heads:
            raise ValueError(f"{layer.num_heads} heads do not divide a width of {width}")
        made = query.clone()
        if not kwargs.get("need_weights", True):
            return made, None
        along = (0, 1) if layer.batch_first or query.dim() < 3 else (1, 0)
        shape = [query.shape[along[0]], query.shape[along[1]], key.shape[along[1]]]
        return made, made.new_empty(shape if query.dim() > 2 else [query.shape[0], key.shape[0]])


class _SizedRecurrent(nn.Module):
    """The sizes of ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def forward(self, given: Any, hidden: Any = None) -> Any:
        layer: Any = self.layer
        if not isinstance(given, torch.Tensor):
            raise TypeError("a packed sequence has no sizes")
        directions = 2 if layer.bidirectional else 1
        for name in ("weight_ih_l0", "weight_ih_l0_reverse")[:directions]:
            _same(layer._parameters[name].shape[1], given.shape[-1])
        out = (layer.proj_size or layer.hidden_size) * directions
        batch = given.shape[:-1]
        made = given.new_empty([*batch, out])
        states = [layer.num_layers * directions, *([] if given.dim() < 3 else [batch[0 if layer.batch_first else 1]])]
        last = given.new_empty([*states, layer.proj_size or layer.hidden_size])
        return made, (last, given.new_empty([*states, layer.hidden_size])) if isinstance(layer, nn.LSTM) else last
