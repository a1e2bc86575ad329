"""Comparing nested outputs and gradients, bit for bit or to a tolerance."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..adapters import torchrec as torchrec_adapter
from ..errors import VerificationError


@dataclasses.dataclass(frozen=True)
class _Container:
    """What holds other values: its kind and how they are arranged."""

    kind: str
    arrangement: Any = None


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, range, slice, type)


def leaves_in(value: Any, where: str = "output") -> Iterator[tuple[str, Any]]:
    """Everything that makes up nested outputs, with the path to it: tensors, plain values, and what kind of container holds them.

    Raises:
        VerificationError: there is an object that cannot be looked into, so that nobody can tell whether two of them are equal.
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            yield where, _Container("nested tensor", str(value.layout))
            yield from _items(enumerate(value.unbind()), where)
        else:
            yield where, value
        return
    inside = torchrec_adapter.parts_of(value)
    if inside is not None:
        yield where, _Container(type(value).__name__)
        for name, part in inside.items():
            yield from leaves_in(part, f"{where}.{name}")
    elif isinstance(value, Mapping):
        yield where, _Container("mapping", tuple(value))
        yield from _items(value.items(), where)
    elif isinstance(value, list | tuple):
        # Graphs hold lists of a class of their own.
        named = type(value) if hasattr(value, "_fields") else None
        yield where, _Container("list" if isinstance(value, list) else "tuple", named)
        yield from _items(enumerate(value), where)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield where, _Container("dataclass", type(value))
        for field in dataclasses.fields(value):
            yield from leaves_in(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, _PLAIN) or (isinstance(value, set | frozenset) and all(isinstance(item, _PLAIN) for item in value)):
        yield where, value
    else:
        raise VerificationError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be compared: return tensors, "
            "TorchRec's jagged and keyed tensors, plain values, or dicts, lists, tuples or dataclasses of them"
        )


def _items(items: Iterable[tuple[Any, Any]], where: str) -> Iterator[tuple[str, Any]]:
    for key, item in items:
        yield from leaves_in(item, f"{where}[{key!r}]")


def tensors_in(value: Any, where: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested outputs, with the path to it.

    Raises:
        VerificationError: as for :func:`leaves_in`.
    """
    for place, leaf in leaves_in(value, where):
        if isinstance(leaf, torch.Tensor):
            yield place, leaf


def bits_differ(found: Any, expected: Any) -> str | None:
    """The first place where two nested outputs are not the same; None if they are.

    Tensors and floats must have the same bits, so 0.0 is not -0.0; only NaN equals NaN of any bits. Other values are compared
    by type and ``==``.

    Raises:
        VerificationError: as for :func:`leaves_in`.
    """
    mine, theirs = dict(leaves_in(found)), dict(leaves_in(expected))
    if mine.keys() != theirs.keys():
        return f"different structure: {sorted(mine.keys() ^ theirs.keys())[:3]}"
    for where, leaf in mine.items():
        other = theirs[where]
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            difference = _tensors_differ(leaf, other)
            if difference is not None:
                return f"{where}{difference}"
        elif type(leaf) is not type(other) or not _same(leaf, other):
            return f"{where}: {_short(leaf)} against {_short(other)}"
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float | complex):
        # As bits: the repr of a number tells -0.0 from 0.0 and is the same for every NaN.
        return repr(a) == repr(b)
    return bool(a == b)


def _short(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor {tuple(leaf.shape)}"
    if isinstance(leaf, _Container):
        arrangement = getattr(leaf.arrangement, "__qualname__", leaf.arrangement)
        leaf = leaf.kind if arrangement is None else f"{leaf.kind} {arrangement}"
        return str(leaf)[:200]
    return repr(leaf)[:200]


def _tensors_differ(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        kinds = [f"{tuple(x.shape)} {x.dtype}" + ("" if x.layout is torch.strided else f" {x.layout}") for x in (a, b)]
        return f": {kinds[0]} against {kinds[1]}"
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    a, b = (x.detach().resolve_conj().resolve_neg() for x in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    same = _as_integers(a) == _as_integers(b)
    if bool(same.all()):
        return None
    if a.dtype.is_floating_point:
        same |= a.double().isnan() & b.double().isnan()
        if bool(same.all()):
            return None
    index = tuple((~same).nonzero()[0].tolist())
    return f"{list(index)}: {a[index].item()!r} against {b[index].item()!r}"


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of every element as a whole number."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def tolerance(dtype: torch.dtype, sums: int = 1) -> float:
    """Allowed difference, relative to the largest magnitude that a tensor has before what cancels in it cancels.

    Gradients are sums over samples; the flat model adds up per rank and then over ranks, an owner adds all samples in one run.
    Each order is off by at most a few rounding steps per term, and the terms' errors do not all point one way: 128 units in
    the last place cover sums of tens of thousands of terms.

    Rounding is relative to the terms and not to their sum. A small table has but a few numbers in its gradient, and among many
    such tables there are some in which all terms nearly cancel; so the magnitude is that of the sum, over the ranks, of the
    flat model's absolute gradients. It is of the size of the gradient itself where nothing cancels: a gradient that is
    missing, or off by one in a thousand, is far out of tolerance unless the ranks' parts cancel to a hundredth or less, and a
    missing one unless they cancel to nothing but rounding.

    Equal terms are rounded all in one direction. A row that n ids hit is a sum of n terms, which may be off by n / 2 units in
    the last place, and so may the other sum: such a table gets n units instead, see :func:`excess`. Table gradients are
    compared exactly in another check, with whole numbers, so nothing is lost.
    """
    return 128 * sums * torch.finfo(dtype).eps


def furthest(
    found: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    terms: Mapping[str, torch.Tensor] | None = None,
    sums: Mapping[str, float] | None = None,
    types: Mapping[str, torch.dtype] | None = None,
) -> tuple[float, str]:
    """The largest difference of any pair, relative to the expected tensor's largest magnitude and to the tolerance of its type.

    A result of at most 1 is within tolerance. A missing tensor equals zeros. ``terms`` are the sums of the absolute values of
    what was summed up in the expected tensors, ``sums`` how many times more terms there were than :func:`tolerance` allows
    for: rounding is relative to both. A gradient that is zero in
    exact arithmetic (a bias before a softmax, what goes into the batch norm of two samples) is nothing but rounding of terms
    that cancel inside a rank, so each may also be off by 32 units in the last place of the largest gradient of all. ``types`` are
    those that tensors were rounded to on their way, if that is not their own.
    """
    terms, sums, types = terms or {}, sums or {}, types or {}
    floor = 32 * _common_scale([*expected.values(), *terms.values()])
    ratios: dict[str, float] = {}
    for key in expected.keys() | found.keys():
        a, b = found.get(key), expected.get(key)
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None and b is not None
        scale = _largest(b.detach().double())
        if key in terms:
            scale = torch.maximum(scale, _largest(terms[key].double()))
        dtype = types.get(key, a.dtype)
        allowed = tolerance(dtype) * sums.get(key, 1.0) * scale + (floor * torch.finfo(dtype).eps).to(b.device)
        ratios[key] = _ratio(a, b, allowed)
    return _worst(ratios)


def excess(terms: int) -> float:
    """How many times the tolerance a sum of that many terms needs."""
    return max(1.0, terms / 128)


_MOST_CANCELLED = 1000.0


def cancellation(
    gradients: Mapping[str, torch.Tensor | None], terms: Mapping[str, torch.Tensor], sums: Mapping[str, float]
) -> dict[str, float]:
    """How many times the tolerance each gradient needs, because its terms are larger than their sum or many; at most 1000."""
    found = {}
    for key, own in terms.items():
        gradient = gradients.get(key)
        size = float(_largest(gradient.detach().double())) if gradient is not None else 0.0
        times = max(float(_largest(own.double())) / size, 1.0) if size else 1.0
        found[key] = min(times * sums.get(key, 1.0), _MOST_CANCELLED)
    return found


def furthest_change(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    cancelled: Mapping[str, float] | None = None,
    types: Mapping[str, torch.dtype] | None = None,
) -> tuple[float, str]:
    """As :func:`furthest`, for the changes of tensors since ``start``.

    An update is added to a value that may be far larger than it, so each may be off by four units in the last place of the
    value on top of the tolerance for the update, and by 32 of the largest update of all. ``cancelled`` is what
    :func:`cancellation` says of the gradients: whatever the optimizer makes of a gradient, an update is
    no more exact than it. That is too little to hide an update that is missing or scaled. ``types`` are those that gradients were
    rounded to on their way.
    """
    floor = 32 * _common_scale(expected[key].detach().double() - was.detach().double() for key, was in start.items())
    cancelled, types = cancelled or {}, types or {}
    ratios: dict[str, float] = {}
    for key, was in start.items():
        before, after = was.detach().double(), expected[key].detach().double()
        if not was.dtype.is_floating_point:
            ratios[key] = 0.0 if torch.equal(found[key], expected[key]) else float("inf")
            continue
        dtype = types.get(key, was.dtype)
        rounding = torch.finfo(was.dtype).eps * 4 * torch.maximum(before.abs(), after.abs())
        rounding += torch.finfo(dtype).eps * floor.to(was.device)
        update = cancelled.get(key, 1.0) * _largest(after - before)
        ratios[key] = _ratio(found[key], expected[key], tolerance(dtype) * update + rounding)
    return _worst(ratios)


def _common_scale(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The largest finite magnitude in any of ``tensors``."""
    sizes = [_largest(tensor.detach().double()).cpu() for tensor in tensors if tensor is not None]
    return torch.stack(sizes).max() if sizes else torch.zeros((), dtype=torch.float64)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude, 0 if there is none."""
    return torch.where(x.isfinite(), x, 0.0).abs().max() if x.numel() else x.new_zeros(())


def _ratio(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest difference as a multiple of ``allowed``; NaN and infinities differ from everything but themselves."""
    if a.numel() == 0:
        return 0.0
    a64, b64 = a.detach().double(), b.detach().double()
    same = (a64 == b64) | (a64 != a64) & (b64 != b64)
    ratio = (a64 - b64).abs() / allowed.clamp(min=torch.finfo(a.dtype).tiny)
    return float(torch.where(same, 0.0, ratio.nan_to_num(nan=float("inf"), posinf=float("inf"))).max())


def _worst(ratios: Mapping[str, float]) -> tuple[float, str]:
    name = max(ratios, key=lambda key: ratios[key], default="")
    return (ratios[name], name) if name and ratios[name] > 0 else (0.0, "")
