"""Gradients of what is no table, averaged over the ranks at the end of every backward pass.

DistributedDataParallel would have to wrap the model's forward, and average tables' gradients with the rest. What is averaged here
is whatever has been accumulated on the parameters of the model that is compiled, by compiled graphs or by code that Dynamo left
to Python between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

_BUCKET = 1 << 23
"""Values that are reduced at once."""


class Averages:
    """What ranks average together: the gradients of every model that is compiled for them, and of parameters without a model.

    ``group`` gives the ranks, ``is_table`` tells what has an owner, and ``lost`` makes the error that is raised, from what an
    exchange that is broken off raises.
    """

    def __init__(
        self,
        group: Callable[[], ProcessGroup],
        is_table: Callable[[torch.Tensor], bool],
        lost: Callable[[Exception], Exception],
        device: torch.device,
    ) -> None:
        self.group = group
        self.is_table = is_table
        self._lost = lost
        self._device = device
        self._models: WeakKeyDictionary[nn.Module, Averaging] = WeakKeyDictionary()
        self._loose = Averaging(self, 0, device)
        # By backward pass: one may run inside another, for a reentrant checkpoint.
        self._pending: dict[int, set[Averaging]] = {}
        self._made = 0

    def of(self, model: nn.Module | None) -> Averaging:
        """The gradients of one model; those of a function's parameters, for None."""
        if model is None:
            return self._loose
        if model not in self._models:
            self._made += 1
            self._models[model] = Averaging(self, self._made, self._device)
        return self._models[model]

    def stop(self) -> None:
        """Leave gradients as they are from now on."""
        for one in (self._loose, *self._models.values()):
            one.stop()

    def plan(self, one: Averaging) -> None:
        """Average when all of the backward pass that is running has been accumulated."""
        task = torch._C._current_graph_task_id()
        if task not in self._pending:
            self._pending[task] = set()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._run, task))
        self._pending[task].add(one)

    def _run(self, task: int) -> None:
        for one in sorted(self._pending.pop(task), key=lambda one: one.number):
            try:
                one.average()
            except Exception as error:
                if not broken_off(error):
                    raise
                raise self._lost(error) from error


class Averaging:
    """The parameters of one model, in one order on all ranks.

    ``anchor`` takes part in every backward pass that exchanges gradients, on all ranks, whatever else it reaches on which of them.
    """

    def __init__(self, averages: Averages, number: int, device: torch.device) -> None:
        self.averages = averages
        self.number = number
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._hooks = [self.anchor.register_post_accumulate_grad_hook(self._reached)]

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of these, too; one that is added twice is averaged once."""
        for parameter in parameters:
            if parameter not in self._parameters and parameter.requires_grad:
                self._parameters[parameter] = True
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _reached(self, anchor: torch.Tensor) -> None:
        anchor.grad = None
        self.averages.plan(self)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self.averages.is_table(parameter):
            self.averages.plan(self)

    def average(self) -> None:
        """Average what has been accumulated on any rank; a collective call."""
        is_table, group = self.averages.is_table, self.averages.group()
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad and not is_table(parameter)]
        if not parameters:
            return
        # A rank may have left some of them out in this step.
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32).to(parameters[0].device)
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


def broken_off(error: Exception) -> bool:
    """Whether an error is what the transport raises where another rank is gone, or late."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


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


def module_on_stack() -> nn.Module | None:
    """The module that torch.compile was given and that is being called, found on the stack: nobody tells. None for a function."""
    found: nn.Module | None = None
    latest: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Torch's own frames only: what asks for a frame's variables keeps them alive until the frame returns.
        if frame.f_code.co_filename == nn.modules.module.__file__:
            held = frame.f_locals.get("self")
            if isinstance(held, torch._dynamo.OptimizedModule):
                # The outermost one counts; a compiled module may be part of another.
                found = held._orig_mod
            elif isinstance(held, nn.Module):
                latest = held
        elif frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith("eval_frame.py"):
            called = getattr(frame.f_locals.get("fn"), "__self__", None)
            found = called if isinstance(called, nn.Module) else latest
        frame = frame.f_back
    return found
