"""Moving blocks of jagged values."""

from __future__ import annotations

import torch


def permute_blocks(values: torch.Tensor, block_lengths: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Put consecutive blocks of ``values`` (N,), of ``block_lengths`` (K,), into ``order`` (M,); entries may repeat or lack."""
    starts = block_lengths.cumsum(0) - block_lengths
    lengths = block_lengths[order]
    shift = starts[order] - (lengths.cumsum(0) - lengths)
    index = torch.repeat_interleave(shift, lengths)
    index += torch.arange(index.numel(), device=index.device)
    return values[index]
