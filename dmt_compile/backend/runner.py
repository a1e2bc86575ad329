"""A compiled graph as Dynamo calls it, with whatever parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import DistributedError
from .averaging import Averaging, broken_off, module_on_stack
from .owners import Ranks, free
from .rewrite import Rewritten
from .start import begin, same_values


class Runner:
    """Runs a compiled graph, and ends the exchanges of all ranks if one of them is lost.

    Dynamo runs one graph for all models of one class that look alike, and for parameters that are put in the place of others:
    those that it brings for the first time get rank 0's values, and owners, as those did that the graph was compiled with.
    """

    def __init__(self, compiled: Callable[..., Any], made: Rewritten, ranks: Ranks, free_unowned: bool) -> None:
        self.compiled = compiled
        self.steps = made.steps
        self.anchored = made.anchored
        self.parameters = made.parameters
        self.ranks = ranks
        self.free_unowned = free_unowned
        self._freed: list[Any] = []
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._last: list[weakref.ref[torch.Tensor]] = []
        self._averaging: Averaging = ranks.averages.of(None)

    def __call__(self, *args: Any) -> Any:
        self.ranks.refuse_if_over()
        try:
            self._look_at([args[place] for place, _ in self.parameters])
            result = self.compiled(*args, *([self._averaging.anchor] if self.anchored else []))
        except Exception as error:
            if broken_off(error):
                raise self.ranks.lost(error) from error
            raise
        # Not before: Dynamo checks that parameters are as they were when it read the code, and compiles once more for these.
        for table in self._freed:
            free(table)
        self._freed.clear()
        return result

    def _look_at(self, parameters: Sequence[Any]) -> None:
        if len(self._last) == len(parameters) and all(known() is one for known, one in zip(self._last, parameters, strict=True)):
            return
        if any(one not in self._known for one in parameters):
            self._take(parameters)
        self._last = [weakref.ref(one) for one in parameters]
        if parameters:
            self._averaging = self._known[parameters[0]]

    def _take(self, parameters: Sequence[Any]) -> None:
        model = module_on_stack()
        averaging = self.ranks.averages.of(model)
        if model is not None:
            begin(model, self.ranks)
        owners = [owner for _, owner in self.parameters]
        for one, owner in zip(parameters, owners, strict=True):
            known = self.ranks.owned(one)
            if known != owner and (known is not None or one in self.ranks.used):
                raise DistributedError(
                    "a table has another place than in the model that this graph was compiled for: another graph has given it one "
                    "before. Call torch._dynamo.reset() on every rank before this model is called for the first time"
                )
        others = [one for one, owner in zip(parameters, owners, strict=True) if owner is None]
        averaging.add(others)
        same_values(others, self.ranks)
        for one, owner in zip(parameters, owners, strict=True):
            self._known[one] = averaging
            if owner is None:
                self.ranks.used[one] = True
            else:
                self.ranks.give(one, owner)
                if self.free_unowned and owner != self.ranks.rank:
                    self._freed.append(one)
