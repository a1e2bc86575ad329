"""Gradients of what is no table, averaged over the ranks at the end of every backward pass.

DistributedDataParallel would have to wrap the model's forward, and average tables' gradients with the rest. What is averaged here
is whatever has been accumulated on the parameters of the model that is compiled, by compiled graphs or by code that Dynamo left
to Python between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

_BUCKET = 1 << 23
"""Values that are reduced at once."""


class Averaging:
    """The parameters whose gradients are averaged over ``group()``, in one order on all ranks; ``is_table`` tells the others."""

    def __init__(self, group: Callable[[], ProcessGroup], is_table: Callable[[torch.Tensor], bool]) -> None:
        self.group = group
        self.is_table = is_table
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._task = -1

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of these, too; one that is added twice is averaged once."""
        for parameter in parameters:
            if parameter not in self._parameters and parameter.requires_grad:
                self._parameters[parameter] = True
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and not self.is_table(parameter):
            self._task = task
            # When all of this backward pass has been accumulated.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._task = -1
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad and not self.is_table(parameter)]
        # A rank may have left some of them out in this step.
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        used = used.to(parameters[0].device)
        group = self.group()
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        shared = [parameter for parameter, some in zip(parameters, used.tolist(), strict=True) if some]
        with torch.no_grad():
            for bucket in _buckets(shared):
                flat = torch.cat([_dense(parameter).reshape(-1) for parameter in bucket])
                dist.all_reduce(flat, group=group)
                flat /= group.size()
                for parameter, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                    assert parameter.grad is not None
                    parameter.grad.copy_(part.view(parameter.shape))


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, of zeros if this rank has none; it becomes a dense one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _buckets(parameters: list[Any]) -> Iterator[list[Any]]:
    """Runs of parameters of one type and device, of about as many values."""
    run: list[Any] = []
    for parameter in parameters:
        other = run and (run[0].dtype, run[0].device) != (parameter.dtype, parameter.device)
        if other or sum(one.numel() for one in run) + parameter.numel() > _BUCKET:
            yield from [run] if run else []
            run = []
        run.append(parameter)
    if run:
        yield run


def module_being_compiled() -> nn.Module | None:
    """The module that torch.compile was given, found on the stack: backends are not told. None for a function."""
    found: nn.Module | None = None
    latest: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        held = frame.f_locals.get("self")
        if isinstance(held, nn.Module):
            latest = held
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith("eval_frame.py"):
            # The outermost one counts; a compiled module may be part of another.
            called = getattr(frame.f_locals.get("fn"), "__self__", None)
            found = called if isinstance(called, nn.Module) else latest
        frame = frame.f_back
    return found
