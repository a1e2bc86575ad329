"""The submodule that holds the towers' modules, and refuses the weights of towers of other features."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..plan import TowerPlan
from .record import HOLDER, TowerVectors

_KEY = "features_"
_SIZE = 4096
_SHOWN = 4
_MOST = 1000


class TowerHolder(nn.ModuleDict):
    """Tower modules by the number of their tower, and as a buffer ``features_N`` the names of the features of tower N.

    Shapes do not tell a tower's weights from those of a tower of as many other features, so the state dict has to. Loading one
    compares its names with those of this program.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], vectors: Sequence[TowerVectors], plan: TowerPlan, home: torch.device
    ) -> None:
        super().__init__({str(number): module for number, module in modules.items()})
        # Where all vectors go on as they are, a flat model's weights fit any towers.
        told = () if all(one.passes for one in vectors) else vectors
        self.features = {one.tower: {"taken": list(one.lookups), "features": list(plan.towers[one.tower].features)} for one in told}
        for number in self.features:
            self.register_buffer(f"{_KEY}{number}", self._text(number).to(home if home.type != "meta" else "cpu"))

    def _text(self, number: int) -> torch.Tensor:
        text = json.dumps(self.features[number], ensure_ascii=False).encode()
        # Of one size for most plans: torch.distributed.checkpoint reads a tensor only into one of its size.
        padded = text.ljust(-(-len(text) // _SIZE) * _SIZE)
        return torch.frombuffer(bytearray(padded), dtype=torch.uint8)

    def reset_parameters(self) -> None:
        """Write the names anew: for buffers that came from the meta device."""
        for key, buffer in self._buffers.items():
            if buffer is not None:
                buffer.copy_(self._text(_number(key)))

    def keep_only(self, tower: int) -> list[str]:
        """Remove what belongs to other towers; the keys that are gone from the state dict, names of features excepted."""
        gone = [key for key in self.state_dict(keep_vars=True) if key.partition(".")[0] not in (str(tower), *self._buffers)]
        for held in [held for held in self._modules if held != str(tower)]:
            del self._modules[held]
        for key in [key for key in self._buffers if _number(key) != tower]:
            del self._buffers[key]
        return gone

    def own_buffer(self, tower: int) -> list[torch.Tensor]:
        """The names of the features of a tower, if it has a module."""
        buffer = self._buffers.get(f"{_KEY}{tower}")
        return [] if buffer is None else [buffer]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._compare(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _compare(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Compare the features of all towers, of other ranks' too, which are then left out.

        Raises:
            PlanError: they are not those of this program.
        """
        found = {}
        for key in [key for key in state_dict if key.startswith(f"{prefix}{_KEY}")]:
            name, value = key[len(prefix) :], state_dict[key]
            if not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            found[_number(name)] = _read(value, key)
            if name not in self._buffers and _number(name) in self.features:
                del state_dict[key]
        for number in sorted(found):
            mine = self.features.get(number)
            if mine is None or mine["taken"] != found[number]["taken"]:
                raise PlanError(
                    f"the state dict is of other towers: {HOLDER}.{number} takes {_listed(found[number]['taken'])} there, and "
                    f"{_listed(mine['taken']) if mine is not None else 'does not exist'} in this program. Its weights mean "
                    f"nothing for other features: compile with towers={_towers(found)}, the towers that it was saved with"
                )
        # Lists of other features may be longer.
        for number in found:
            key = f"{_KEY}{number}"
            if prefix + key in state_dict and (own := self._buffers.get(key)) is not None:
                state_dict[prefix + key] = self._text(number).to(own.device if not own.is_meta else "cpu")


def _number(key: str) -> int:
    return int(key.removeprefix(_KEY))


def _read(value: torch.Tensor, key: str) -> dict[str, list[str]]:
    try:
        read: dict[str, list[str]] = json.loads(bytes(value.detach().cpu().tolist()))
        return {"taken": read["taken"], "features": read["features"]}
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(
            f"'{key}' of the state dict does not hold the names of a tower's features, as UTF-8 JSON in uint8 as it was saved: "
            "load the state dict of a program with tower modules"
        ) from error


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} feature{'s' if len(names) != 1 else ''} ({shown})"


def _towers(found: Mapping[int, Mapping[str, Sequence[str]]]) -> str:
    """The lists to compile with, whole where they are not long and the state dict has those of all towers."""
    if sorted(found) == list(range(len(found))):
        text = str([list(found[number]["features"]) for number in sorted(found)])
        if len(text) <= _MOST:
            return text
    return "[[...], [...]]"
