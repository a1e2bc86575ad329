"""Some rows of a table that several ranks hold together, as an entry of a state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import DistributedError
from ..lookups import Table


class RowShards(torch.Tensor):
    """A tensor of the whole table's shape, of which only the runs of rows in ``parts`` are here.

    ``parts`` maps the first row of a run to its values, (rows, dim). ``torch.distributed.checkpoint`` saves and loads the runs as
    chunks of one tensor, so that a checkpoint has one table, whichever ranks held its rows; ``torch.save`` keeps the runs. It can
    be cloned and cast; nothing can be computed with it.
    """

    parts: Mapping[int, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: Mapping[int, torch.Tensor]) -> RowShards:
        some = next(iter(parts.values()))
        made: RowShards = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=some.dtype, device=some.device)
        made.parts = dict(parts)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _EACH_PART:
            one = args[0]
            return RowShards(one.shape, {start: func(part, *args[1:], **(kwargs or {})) for start, part in one.parts.items()})
        raise DistributedError(
            f"a table that several ranks hold together cannot be used as one tensor ({func}): take it from full_state_dict(), "
            "or its runs of rows on this rank from .parts"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        runs = ", ".join(f"{start}:{start + len(part)}" for start, part in self.parts.items())
        return f"RowShards({tuple(self.shape)}, rows {runs})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RowShards, (tuple(self.shape), dict(self.parts))

    def __deepcopy__(self, memo: Any) -> RowShards:
        return RowShards(self.shape, {start: part.detach().clone() for start, part in self.parts.items()})

    # torch.distributed.checkpoint's protocol for tensors of which a rank holds parts.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.shape),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([start] + [0] * (part.dim() - 1)), part.shape) for start, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


_EACH_PART = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)

# So that torch.load takes a state dict of a rank as it takes any other.
torch.serialization.add_safe_globals([RowShards])


def cut_rows(value: torch.Tensor, tables: Sequence[Table], key: str) -> torch.Tensor:
    """The rows of ``tables``, one after the other, out of a state dict's entry for the parameter that holds them.

    Raises:
        DistributedError: the entry is of another rank and lacks some of the rows.
    """
    if not isinstance(value, RowShards):
        return torch.cat([value[table.start : table.end] for table in tables])
    rows = []
    for table in tables:
        at = table.start
        while at < table.end:
            first = next((start for start, part in value.parts.items() if start <= at < start + len(part)), None)
            if first is None:
                _refuse(key, table, value)
            end = min(table.end, first + len(value.parts[first]))
            rows.append(value.parts[first][at - first : end - first])
            at = end
    return torch.cat(rows)


def _refuse(key: str, table: Table, value: RowShards) -> NoReturn:
    raise DistributedError(
        f"'{key}' in the state dict is {value!r}, without all of the rows {table.start}:{table.end} that this rank holds: load the "
        "state dict that this rank saved under this plan, a full_state_dict(), or one through torch.distributed.checkpoint"
    )
