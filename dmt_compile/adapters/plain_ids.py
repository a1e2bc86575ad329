"""Reading the ids of plain PyTorch lookups: tensors of any shape, with offsets or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InputError
from ..lookups import IdSource


def read_ids(
    ids: Any, extra: Sequence[torch.Tensor], source: IdSource
) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys (F names), values (N,), lengths (F, units) and weights (N,) or None of a tensor of ids.

    Raises:
        InputError: the ids are no integers, not the fixed number per sample that the model was compiled for, or their offsets or
            weights do not fit.
    """
    if not isinstance(ids, torch.Tensor) or ids.dtype.is_floating_point or ids.dtype is torch.bool:
        found = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InputError(f"'{source.label}' must hold integer ids, got {found}")
    if source.wraps:
        # Indexing counts from the end where a lookup does not.
        ids = torch.where(ids < 0, ids + source.wraps, ids)
    values, lengths = _fixed(ids, source) if source.form == "fixed" else _cut(ids, extra[0], source)
    weights = extra[-1].reshape(-1) if source.weighted else None
    if weights is not None and source.weight_dtype is not None and not weights.dtype.is_floating_point:
        weights = weights.to(source.weight_dtype)
    if weights is not None and weights.numel() != ids.numel():
        raise InputError(f"'{source.label}' has {weights.numel()} weights for {ids.numel()} ids")
    return list(source.features), values, lengths, weights


def _fixed(ids: torch.Tensor, source: IdSource) -> tuple[torch.Tensor, torch.Tensor]:
    features = len(source.features)
    # Bags may be of any size; it is the same for all of a batch.
    count = source.count or (ids.shape[-1] if ids.dim() else 0)
    if not _fits(ids.shape, source.shape) or (source.count and ids.numel() % (count * features)):
        raise InputError(
            f"'{source.label}' has ids of shape {tuple(ids.shape)}, the model was compiled for {_shape_text(source)}"
            f"{_advice(source)}"
        )
    units = ids.numel() // (count * features) if source.count else ids.shape[0]
    values = ids.reshape(-1, features).t() if features > 1 else ids
    lengths = torch.full((features, units), count, dtype=torch.long, device=ids.device)
    return values.reshape(-1), lengths


def _cut(ids: torch.Tensor, offsets: torch.Tensor, source: IdSource) -> tuple[torch.Tensor, torch.Tensor]:
    if offsets.dtype not in (torch.int32, torch.int64):
        raise InputError(f"the offsets of '{source.label}' must be int32 or int64, got {offsets.dtype}")
    if not source.include_last_offset:
        offsets = torch.cat([offsets, offsets.new_tensor([ids.numel()])])
    lengths = offsets.diff().unsqueeze(0).long()
    if offsets.numel() == 0 or bool((lengths < 0).any()) or int(offsets[0]) != 0:
        raise InputError(f"the offsets of '{source.label}' must start at 0 and not decrease")
    return ids.reshape(-1), lengths


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether ``shape`` is the expected one, in which -1 and None stand for any size."""
    return len(shape) == len(expected) and all(want in (-1, None, size) for size, want in zip(shape, expected, strict=True))


def _advice(source: IdSource) -> str:
    """What to do about ids of another shape."""
    if not source.count or source.unit != "sample" or len(source.shape) < 2:
        return ""
    if len(source.features) > 1:
        return f": the last dimension holds {len(source.features)} features, an id of a table of its own in each place"
    return f": pad or cut them to that shape{f' ({source.because})' if source.because else ''}"


def _shape_text(source: IdSource) -> str:
    per_unit = source.count * len(source.features)
    for size in source.shape:
        per_unit //= size if size is not None and size > 0 else 1
    grows = "B" if per_unit <= 1 else f"{per_unit} * B"
    sizes = ", ".join("any" if size is None else grows if size < 0 else str(size) for size in source.shape)
    return f"shape ({sizes}{',' if len(source.shape) == 1 else ''}) for B samples"
