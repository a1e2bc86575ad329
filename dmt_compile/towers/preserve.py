"""A warm start: weights of a tower model that compute what a trained flat model computes, as far as linear algebra allows.

With vectors e of the flat model and z = M e of the tower modules, M with orthonormal rows, a layer that takes e with weights W
takes z with W M^T, and one that makes a vector to be put beside them makes it with M W: along every axis that is made of vectors,
the new weights are the old ones contracted with M. M keeps as much of the vectors seen in sample batches as any matrix of its size
can (a truncated singular value decomposition); where nothing is compressed it keeps all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..errors import PlanError, first_line
from ..graphs import copy_graph, graph_module_over
from ..resize import Segment
from .insert import Inserted, kept_count, pieces_of
from .record import TowerVectors
from .tries import expected_matrix, refuse_other_values


class Kept:
    """What the modules keep: ``each`` of a single vector, (new width, old width), or ``every`` of all, (new, old) columns."""

    def __init__(self, each: torch.Tensor | None, every: torch.Tensor | None) -> None:
        self.each, self.every = each, every


def set_modules(
    modules: Mapping[int, nn.Module], vectors: Sequence[TowerVectors], seen: Sequence[torch.Tensor], order: Sequence[str]
) -> Kept:
    """Let tower modules keep as much of the vectors ``seen``, one (rows, vectors, width) or (rows, columns) each, as they can.

    Raises:
        PlanError: a module has no method ``set_linear(matrix)``, or does not compute ``matrix @ x`` behind it.
    """
    alike = all(one.equal_widths for one in vectors) and len({one.widths[0] for one in vectors}) == 1
    made = {one.width for one in vectors}
    each = None
    if alike and len(made) == 1:
        each = largest(torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]), *made)
    one_for_each = kept_count(vectors)
    blocks = []
    for one, rows in zip(vectors, seen, strict=True):
        if one.passes:
            blocks.append(torch.eye(sum(one.widths), dtype=rows.dtype))
            continue
        if one_for_each and one.equal_widths:
            own = largest(rows.reshape(-1, one.widths[0]), one.width) if each is None else each
            blocks.append(torch.block_diag(*[own] * len(one.lookups)))
        else:
            blocks.append(largest(rows.flatten(1), one.columns))
        _set(modules[one.tower], blocks[-1], one)
    if one_for_each and each is not None:
        return Kept(each, None)
    # Rows as the interaction gets them, columns as it has them.
    widths = {name: width for one in vectors for name, width in zip(one.lookups, one.widths, strict=True)}
    starts, total = {}, 0
    for name in order:
        starts[name] = total
        total += widths[name]
    apart = []
    for one, block in zip(vectors, blocks, strict=True):
        spread = torch.zeros(len(block), total, dtype=block.dtype)
        columns = [starts[name] + column for name in one.lookups for column in range(widths[name])]
        spread[:, columns] = block
        apart.append(spread)
    every = [apart[number][start : start + width] for number, start, width in pieces_of(vectors, order)]
    return Kept(each, torch.cat(every))


def _set(module: nn.Module, matrix: torch.Tensor, one: TowerVectors) -> None:
    where = f"init='preserve': set_linear of {type(module).__name__}, tower {one.tower} ({', '.join(one.lookups[:3])}"
    where += ", ...)" if len(one.lookups) > 3 else ")"
    setter: Any = getattr(module, "set_linear", None)
    if setter is None:
        raise PlanError(
            f"init='preserve': {type(module).__name__} of tower {one.tower} has no method set_linear(matrix), which makes it "
            f"compute matrix @ x for the columns x of its features. {expected_matrix(matrix, one)}: add one, or use init='layer'"
        )
    try:
        with torch.no_grad():
            # It may write to what it is given.
            setter(matrix.clone())
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    except Exception as error:
        raise PlanError(f"{where}, raises {first_line(error)}. {expected_matrix(matrix, one)}") from error
    refuse_other_values(module, matrix, one, where)


def keep_and_bring_back(module: nn.Module, expansion: nn.Module, rows: torch.Tensor, one: TowerVectors) -> None:
    """Let a tower's module keep most of the vectors ``rows``, and the layer behind the exchange bring them back."""
    assert isinstance(expansion, nn.Linear)
    count = len(one.lookups)
    if one.equal_widths and one.vectors == count:
        matrix = torch.block_diag(*[largest(rows.reshape(-1, one.widths[0]), one.width)] * count)
    else:
        matrix = largest(rows.flatten(1), one.columns)
    _set(module, matrix, one)
    with torch.no_grad():
        expansion.weight.copy_(matrix.mT)
        expansion.bias.zero_()


def largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The (count, columns) matrix with orthonormal rows that keeps most of ``rows``: their first right singular vectors.

    Where ``count`` is no less than the columns, all of them as they are, and zeros. Signs are such that no row's sum is negative: a
    dense vector that joins has often come through a ReLU, which cuts off what is negative of its re-sized layer.

    Raises:
        PlanError: some of ``rows`` are not finite.
    """
    columns = rows.shape[1]
    if count >= columns:
        return torch.eye(count, columns, dtype=rows.dtype)
    wide = rows.double()
    if not bool(wide.isfinite().all()):
        raise PlanError(
            "init='preserve': among the vectors that example_inputs look up are some that hold NaN or infinite values, of which no "
            "largest part can be kept: look at the tables' values"
        )
    # Few columns, many rows.
    _, vectors = torch.linalg.eigh(wide.mT @ wide)
    kept = vectors.flip(1)[:, :count].mT
    kept = torch.where(kept.sum(dim=1, keepdim=True) < 0, -kept, kept)
    return kept.to(rows.dtype).contiguous()


def seen_vectors(inserted: Inserted, root: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    """What every tower's module is given for some inputs."""
    graph = copy_graph(inserted.graph)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = ([node for node in graph.nodes if node.name.startswith("vectors_") and _takes(node)],)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    with torch.no_grad():
        found: list[torch.Tensor] = graph_module_over(root, graph, inserted.extras, "Seen")(*inputs[0], **inputs[1])
    return [one.detach().cpu() for one in found]


def _takes(node: fx.Node) -> bool:
    return str(node.target) == f"dmt.{node.name}"


def set_resized(
    root: nn.Module, old: Mapping[str, torch.Tensor], axes: Mapping[str, tuple[tuple[Segment, ...], ...]], kept: Kept
) -> list[str]:
    """Give re-sized tensors the old ones' values, contracted along the axes that are made of vectors.

    Returns the names of those that do not follow by linear algebra: they are drawn as their layer's class draws them.
    """
    left = []
    for name, made_of in axes.items():
        value: torch.Tensor | None = old[name].detach()
        spread = _spreads(root, name)
        for axis, segments in enumerate(made_of):
            value = _contracted(value, axis, segments, kept, spread) if value is not None else None
        path, _, attribute = name.rpartition(".")
        module = root.get_submodule(path)
        target: torch.Tensor = getattr(module, attribute)
        if value is None or value.shape != target.shape:
            left.append(name)
        elif target is not old[name]:
            with torch.no_grad():
                target.copy_(value)
        elif not torch.equal(value, target):
            # Of the same shape, and so far the flat model's own.
            if isinstance(target, nn.Parameter):
                module._parameters[attribute] = nn.Parameter(value.clone(), requires_grad=target.requires_grad)
            else:
                module._buffers[attribute] = value.clone()
    return left


def _spreads(root: nn.Module, name: str) -> bool:
    """Whether a tensor scales columns or says how far they vary, which a sum of columns does by its squared weights."""
    module = root.get_submodule(name.rpartition(".")[0])
    norm = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.modules.batchnorm._NormBase)
    return norm and name.rpartition(".")[2] in ("weight", "running_var")


def _contracted(value: torch.Tensor, axis: int, segments: Sequence[Segment], kept: Kept, spread: bool) -> torch.Tensor | None:
    parts, start = [], 0
    for segment in segments:
        part = value.narrow(axis, start, segment.old).movedim(axis, -1)
        start += segment.old
        matrix = kept.every if segment.every and kept.every is not None else None
        if matrix is None and segment.vectors and kept.each is not None and (kept.every is None or not segment.every):
            one = torch.kron(kept.each, kept.each) if segment.power == 2 else kept.each
            matrix = torch.block_diag(*[one] * segment.vectors)
        if matrix is not None and matrix.shape == (segment.new, segment.old):
            matrix = matrix.to(part.device, part.dtype)
            part = part @ (matrix**2 if spread else matrix).mT
            if spread:
                # A column that is always zero.
                part = torch.where((matrix == 0).all(dim=1), torch.ones_like(part), part)
        elif segment.old != segment.new:
            return None
        parts.append(part.movedim(-1, axis))
    return torch.cat(parts, dim=axis)
