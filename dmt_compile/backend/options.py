"""What ``torch.compile(..., backend="dmt", options={...})`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from ..errors import PlanError
from ..topology import Topology

_ELSEWHERE = {
    name: (
        f"'{name}' changes the model, and torch.compile never does: call dmt_compile.towerize(model, topology, {name}=...), and "
        "distribute() what it returns"
    )
    for name in ("tower_module", "expand", "init", "seed")
}


@dataclass(frozen=True)
class Options:
    """Options of the backend.

    topology: hosts and ranks per host; by default those that torchrun has started.
    towers: how many towers; by default one for each host.
    partition: how tables are spread, as for ``towerize``.
    inner: what compiles the rewritten graphs: the name of a registered backend, or a function.
    free_unowned: give the memory of tables that other ranks own back to the system.
    timeout: seconds that a rank waits for another one in an exchange; by default those of the process group.
    """

    topology: Topology | None = None
    towers: int | None = None
    partition: str = "balanced"
    inner: str | Callable[..., Any] = "inductor"
    free_unowned: bool = False
    timeout: float | timedelta | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """The options that a user gave, checked.

        Raises:
            PlanError: an option that does not exist, or a value that it cannot have.
        """
        given = dict(given or {})
        known = [field.name for field in fields(cls)]
        for name in given:
            if name in _ELSEWHERE:
                raise PlanError(f"backend 'dmt': {_ELSEWHERE[name]}")
            if name not in known:
                raise PlanError(f"backend 'dmt' has no option '{name}'; its options are {', '.join(known)}")
        made = cls(**given)
        if isinstance(made.timeout, timedelta):
            made = cls(**{**given, "timeout": made.timeout.total_seconds()})
        for name, fits, expected in (
            ("topology", made.topology is None or isinstance(made.topology, Topology), "a dmt_compile.Topology"),
            ("towers", made.towers is None or _counts(made.towers), "a number of towers, 1 or more"),
            ("partition", made.partition in ("balanced", "strided"), "'balanced' or 'strided'"),
            ("inner", callable(made.inner) or _is_backend(made.inner), _BACKENDS()),
            ("free_unowned", isinstance(made.free_unowned, bool), "True or False"),
            ("timeout", made.timeout is None or _is_positive(made.timeout), "a number of seconds, or a timedelta"),
        ):
            if not fits:
                raise PlanError(f"backend 'dmt': option '{name}' must be {expected}, got {getattr(made, name)!r}")
        return made


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _names() -> list[str]:
    import torch

    names: list[str] = torch._dynamo.list_backends(exclude_tags=())
    return [name for name in names if name != "dmt"]


def _is_backend(name: Any) -> bool:
    return isinstance(name, str) and name in _names()


def _BACKENDS() -> str:
    return f"a function, or one of {', '.join(_names())}"
