"""From what the user asks for to one checked module per tower."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import PlanError, first_line
from ..lookups import LookupSet
from ..plan import TowerPlan
from .modules import Factory, PassedVectors, PassThrough
from .placed import refuse_places, refuse_types
from .record import TowerVectors
from .tries import refuse_mixing

TowerModules: TypeAlias = Factory | Sequence[Factory] | Mapping[int, Factory]
"""One factory for all towers, a list with one for each, or those of some towers by number; the others pass through."""


def make_modules(
    wanted: TowerModules, plan: TowerPlan, lookups: LookupSet, names: Sequence[str], seed: int, device: torch.device
) -> tuple[tuple[TowerVectors, ...], dict[int, nn.Module]]:
    """The modules of all towers that serve any of the lookups ``names``, with what they take and make.

    Every tower's module is made with a seed of its own, the same on all ranks, tried on a few rows, and moved to ``device``.

    Raises:
        PlanError: a module that cannot be made, does not declare ``vectors`` and ``width``, or does not make them; one that
            mixes rows, changes their number or their type, or is on another device than the tables.
    """
    factories = _by_tower(wanted, len(plan.towers))
    chosen, records, modules = set(names), [], {}
    for number, tower in enumerate(plan.towers):
        served = [name for name in lookups.lookup if name in chosen and name in set(tower.features)]
        if not served:
            continue
        widths = tuple(lookups.lookup[name].dim for name in served)
        where = f"{_line(factories[number])}tower_module of tower {number} ({_short(served)})"
        dtypes = {lookups.lookup[name].dtype for name in served}
        if len(dtypes) > 1:
            raise PlanError(f"{where}: its vectors are of different types, {', '.join(sorted(map(str, dtypes)))}")
        dtype = dtypes.pop()
        module = _make(factories[number], widths, where, seed + number, dtype)
        refuse_places(module, device, where, moves=not isinstance(factories[number], nn.Module))
        refuse_types(module, widths, dtype, where)
        vectors, width = _declared(module, widths, where)
        records.append(TowerVectors(number, tuple(served), widths, vectors, width, isinstance(module, PassedVectors)))
        modules[number] = module if isinstance(factories[number], nn.Module) else module.to(device)
    return tuple(records), modules


def refuse_widths(records: Sequence[TowerVectors]) -> None:
    """Vectors that an interaction takes in one axis must be equally wide.

    Raises:
        PlanError: they are not.
    """
    made = {record.width for record in records if not record.passes or record.equal_widths}
    if len(made) > 1:
        listed = ", ".join(f"tower {record.tower}: {record.width}" for record in records)
        raise PlanError(
            f"tower modules must make vectors of one width for this interaction, these make {listed}: give them one width, or "
            "expand=True, which brings each tower's vectors back to their old width behind the exchange"
        )


def _by_tower(wanted: TowerModules, towers: int) -> list[Factory]:
    if isinstance(wanted, str | bytes):
        raise PlanError(f"tower_module is the text {wanted!r}: give {_ALLOWED}")
    if isinstance(wanted, Mapping):
        odd = [key for key in wanted if not isinstance(key, int) or isinstance(key, bool) or key not in range(towers)]
        if odd:
            raise PlanError(f"tower_module names tower {odd[0]!r}, the plan has towers 0 to {towers - 1}")
        found = [wanted.get(number, PassThrough()) for number in range(towers)]
    elif isinstance(wanted, Sequence):
        if len(wanted) != towers:
            raise PlanError(f"tower_module lists {len(wanted)} modules, the plan has {towers} towers: give one for each")
        found = list(wanted)
    else:
        found = [wanted] * towers
    for number, factory in enumerate(found):
        if isinstance(factory, nn.Module) and towers > 1 and not isinstance(wanted, Sequence | Mapping):
            raise PlanError(
                "tower_module is one module, but every tower needs one of its own: give a function f(num_features, width) that "
                "makes it, or a list with a module for each tower"
            )
        if not callable(factory):
            raise PlanError(
                f"tower_module of tower {number} must be a module or make one, got {type(factory).__name__}: give {_ALLOWED}"
            )
    return found


_ALLOWED = (
    "DLRMTower(...), CrossTower(...), PassThrough() or a function f(num_features, width) that makes a module, a list with one of "
    "these for each tower, or a dict of them by tower"
)


def _make(factory: Factory, widths: Sequence[int], where: str, seed: int, dtype: torch.dtype) -> nn.Module:
    make: Callable[[], Any]
    if isinstance(factory, nn.Module):
        return factory
    called = f"as f(num_features, width), here f({len(widths)}, {widths[0]})"
    if len(set(widths)) == 1:
        make = partial(factory, len(widths), widths[0])
    elif isinstance(factory, PassThrough):
        return PassedVectors(1, sum(widths))
    else:
        mixed = getattr(factory, "mixed", None)
        if mixed is None:
            raise PlanError(
                f"{where}: its features are {list(widths)} wide, and a function of one width cannot make a module for them: put "
                "features of one width into a tower, or give the factory a method mixed(widths), whose module takes (rows, "
                f"{sum(widths)})"
            )
        make = partial(mixed, widths)
        called = f"as mixed(widths), here mixed({tuple(widths)})"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = make()
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from error
        except Exception as error:
            raise PlanError(f"{where} cannot be made, it is called {called}: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise PlanError(f"{where}: a torch.nn.Module is needed, the factory made a {type(module).__name__}")
    return module.to(dtype)


def _declared(module: nn.Module, widths: Sequence[int], where: str) -> tuple[int, int]:
    """Its vectors and their width, tried on a few rows."""
    declared = tuple(getattr(module, name, None) for name in ("vectors", "width"))
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 1 for value in declared):
        raise PlanError(
            f"{where}: {type(module).__name__} must declare what it makes as two whole numbers: self.vectors, the vectors per "
            f"sample, and self.width, their columns; found {declared[0]!r} and {declared[1]!r}"
        )
    batching = next((child for child in module.modules() if isinstance(child, nn.modules.batchnorm._NormBase)), None)
    if batching is not None and not isinstance(batching, nn.modules.instancenorm._InstanceNorm):
        raise PlanError(
            f"{where}: {type(batching).__name__} uses statistics of the batch, but a tower sees other samples on every rank than "
            "the model would: normalise each sample by itself (LayerNorm, RMSNorm)"
        )
    refuse_mixing(module, widths, where)
    vectors, width = declared
    assert isinstance(vectors, int) and isinstance(width, int)
    return vectors, width


def _line(factory: Any) -> str:
    """Where a module or a factory is written, as a beginning of an error; nothing for those of this library."""
    target = factory if isinstance(factory, type) or inspect.isfunction(factory) else type(factory)
    if target.__module__.partition(".")[0] in ("dmt_compile", "torch", "builtins"):
        return ""
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}: "
    except (OSError, TypeError):
        return ""


def _short(names: Sequence[str]) -> str:
    return f"{len(names)} feature{'s' if len(names) > 1 else ''}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
