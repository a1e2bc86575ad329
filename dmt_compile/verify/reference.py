"""What the program is compared with: the flat model, or the tower model, on every rank's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.sources import reason
from ..errors import DmtError, InputError
from ..hints import longest_of_the_batch, number_of_samples
from ..stage import Stage
from .cluster import Inputs
from .compare import tensors_in
from .copies import Copies
from .structure import by_name


@dataclass(frozen=True)
class Reference:
    """The user's own forward, with the number of samples of every rank and the names of forward's arguments."""

    stage: Stage
    inputs: Inputs
    sizes: Sequence[int]
    seed: int
    names: Sequence[str]

    def outputs(self, copies: Copies) -> list[Any]:
        """What forward returns on every rank.

        Raises:
            InputError: it does not run on what a rank gets of the batch.
        """
        outputs = []
        for rank, (args, kwargs) in enumerate(self.inputs):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed + rank)
                try:
                    outputs.append(copies.roots[rank](*args, **kwargs))
                except DmtError:
                    raise
                except Exception as error:
                    raise self._refusal(rank, error) from error
        return outputs

    def _refusal(self, rank: int, error: Exception) -> InputError:
        if self.sizes[rank] == 0:
            return InputError(
                f"the flat model does not run on no samples, which is what rank {rank} gets of this batch "
                f"({type(error).__name__}: {error}): verify with at least {len(self.sizes)} samples"
            )
        args, kwargs = self.inputs[rank]
        first = sum(self.sizes[:rank])
        last, batch = first + self.sizes[rank] - 1, sum(self.sizes)
        samples = f"sample {first}" if first == last else f"samples {first} to {last}"
        given = by_name(args, kwargs, self.names)
        hints = longest_of_the_batch(self.stage.graph.nodes) + number_of_samples(given, batch, error)
        return InputError(
            f"the flat model does not run on what rank {rank} gets of this batch of {batch}, {samples}.\n  {reason(error)}{hints}\n"
            "Check that the batch fits the model; if it does, let forward take any part of a batch, as every rank gets one."
        )


def objectives(outputs: Sequence[Any], seed: int) -> list[torch.Tensor | None]:
    """Of every rank, <output, random cotangent>; None where no output can be trained.

    Raises:
        InputError: no output of any rank can be trained.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor | None] = []
    for output in outputs:
        terms = []
        for _, tensor in tensors_in(output):
            if tensor.is_complex():
                tensor = torch.view_as_real(tensor.resolve_conj())
            if not tensor.dtype.is_floating_point:
                continue
            # Drawn whether or not it is needed, so that all stages get the same ones.
            cotangent = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
            if tensor.requires_grad:
                terms.append((tensor * cotangent).sum().double())
        found.append(torch.stack(terms).sum() if terms else None)
    if all(objective is None for objective in found):
        raise InputError("no output of the model depends on a trainable parameter, so there is no gradient to compare")
    return found
