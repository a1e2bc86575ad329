"""Copies of a model to train, one for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..adapters import torchrec_sequences
from ..graphs import clone_sharing_tensors, clone_with_parameters

Gradients = dict[str, torch.Tensor | None]


@dataclass
class Copies:
    """A copy of the model to train: one set of parameters, and per rank a module tree with buffers of its own."""

    parameters: dict[str, nn.Parameter]
    roots: list[nn.Module]

    @classmethod
    def of(cls, root: nn.Module, world_size: int) -> Copies:
        base = clone_with_parameters(root)
        roots = [clone_sharing_tensors(base, copy_buffers=True) for _ in range(world_size)]
        for copy in roots:
            torchrec_adapter.accept_empty_batches(copy)
            torchrec_sequences.accept_empty_batches(copy)
        return cls(dict(base.named_parameters()), roots)

    def gradients(self) -> Gradients:
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: dense(grad) if grad is not None else None for name, grad in grads.items()}

    def clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def dense(x: torch.Tensor) -> torch.Tensor:
    return x.to_dense() if x.is_sparse else x
