"""Which feature each element of a tensor comes from, through every ATen operator.

Labels of a tensor are whole numbers of the same shape: 0 for what is the same in every sample (parameters) or says nothing about a
feature (ids, masks), :data:`DENSE` for the model's other inputs, a number of its own for every vector that is looked up, and
:data:`MIXED` where several of these have met. None stands for zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .ops import ALONG, ATTENTION, COMPARISONS, LIKE, MOVES, NONLINEAR, NORMS, REDUCTIONS, SAME

Labels = torch.Tensor | None
DENSE = 1
FIRST = 2
MIXED = 2**40

Family = Literal[
    "move", "unary", "nonlinear", "square", "add", "mul", "gate", "reduce", "linear", "product", "softmax", "norm", "other"
]


@dataclass(frozen=True)
class Rule:
    """What an operator does: its family, whether different features first meet here, and the labels of what it returns."""

    family: Family
    mixes: bool
    labels: Sequence[Labels]


@dataclass(frozen=True)
class Call:
    """One call of an operator with the labels of its tensors, in the order in which they stand in its arguments.

    ``mark_of`` gives labels that are all 0 too, where
    ``label_of`` gives None: something may be written there later. ``width_of`` is the number of columns of a looked-up row by
    label; ``from_softmax`` tells of a tensor whether it holds the
    weights of a softmax.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outs: Sequence[torch.Tensor]
    label_of: Callable[[torch.Tensor], Labels]
    mark_of: Callable[[torch.Tensor], Labels]
    width_of: Mapping[int, int]
    from_softmax: Callable[[torch.Tensor], bool]

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket).removeprefix("aten.")


def rule(call: Call) -> Rule:
    """The rule that fits an operator; for one that is not known, everything that it takes meets in everything it returns."""
    name = call.name.removesuffix("_") if call.name not in MOVES else call.name
    tensors = tensors_in((call.args, call.kwargs))
    if call.name in MOVES and any(call.mark_of(tensor) is not None for tensor in tensors):
        return _move(call) or _everything(call)
    if not any(call.label_of(tensor) is not None for tensor in tensors):
        return Rule("move" if name in MOVES or name in SAME else "other", False, [None] * len(call.outs))
    if name in COMPARISONS or name in LIKE:
        return Rule("other", False, [None] * len(call.outs))
    for names, make in _TABLE:
        if name in names:
            found = make(call)
            if found is not None:
                return found
    if torch.Tag.pointwise in call.func.tags and len(call.outs) == 1:
        return _pointwise(call)
    return _moved_by_a_stranger(call) or _everything(call)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in the arguments of an operator, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    return []


def raw(labels: Labels) -> torch.Tensor | None:
    """Where labels stand for one lookup or for dense inputs."""
    return None if labels is None else (labels > 0) & (labels < MIXED)


def union(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Labels of what is made of both, with broadcasting."""
    return torch.where(a == 0, b, torch.where((b == 0) | (a == b), a, MIXED))


def collapse(labels: torch.Tensor, dims: list[int], keepdim: bool = False) -> tuple[torch.Tensor, bool]:
    """Labels of what is made of all along ``dims``, and whether different ones meet there."""
    if not dims:
        return labels, False
    if any(labels.shape[dim] == 0 for dim in dims):
        shape = [1 if d in dims else s for d, s in enumerate(labels.shape)]
        return labels.new_zeros(shape if keepdim else [s for d, s in enumerate(labels.shape) if d not in dims]), False
    most = labels.amax(dims, keepdim=True)
    least = torch.where(labels == 0, MIXED, labels).amin(dims, keepdim=True)
    result = torch.where((most == 0) | (most == least), most, MIXED)
    meets = bool(((result == MIXED) & (least < MIXED)).any())
    if not keepdim:
        result = result.reshape([s for d, s in enumerate(labels.shape) if d not in dims])
    return result, meets


def _with_labels(call: Call, value: Any) -> Any:
    """An argument with labels in the place of tensors and 0 in that of numbers."""
    if isinstance(value, torch.Tensor):
        return zeros_or(call.mark_of(value), value)
    if isinstance(value, list | tuple):
        return [_with_labels(call, part) for part in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def zeros_or(labels: Labels, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape, dtype=torch.long, device=value.device) if labels is None else labels


def _move(call: Call) -> Rule | None:
    places = MOVES[call.name]
    args = [_with_labels(call, value) if place in places else value for place, value in enumerate(call.args)]
    if call.name == "constant_pad_nd":
        args = [*args[:2], 0]
    kwargs = {key: value for key, value in call.kwargs.items() if key not in ("value", "src", "dtype")}
    try:
        made = call.func(*args, **kwargs)
    except RuntimeError:
        # Labels lie in memory in their own way, which a view may not fit.
        if call.name not in ("view", "_unsafe_view"):
            return None
        made = args[0].reshape(args[1])
    return Rule("move", False, tensors_in(made))


def _same(call: Call) -> Rule:
    labels = call.label_of(call.args[0])
    # What is made of true and false says where, not what.
    masks = call.args[0].dtype is torch.bool or call.name == "zero_"
    return Rule("move", False, [None if masks or labels is None else labels.clone()])


def _nonlinear(call: Call) -> Rule:
    labels = call.label_of(call.args[0])
    return Rule("nonlinear", False, [None if labels is None else labels.clone() for _ in call.outs])


def _norm(call: Call) -> Rule:
    labels = call.label_of(call.args[0])
    first = None if labels is None else labels.clone()
    return Rule("norm", False, [first if out.shape == call.args[0].shape else None for out in call.outs])


def _dims(value: Any, rank: int) -> list[int]:
    if value is None or value == []:
        return list(range(rank))
    return sorted({dim % max(rank, 1) for dim in ([value] if isinstance(value, int) else value)})


def _reduce(call: Call) -> Rule | None:
    value = call.args[0]
    labels = call.label_of(value)
    if labels is None or (len(call.args) > 1 and isinstance(call.args[1], torch.Tensor)):
        return None
    name = call.name
    place = 2 if name in ("linalg_vector_norm", "norm") else 1
    given = call.args[place] if len(call.args) > place else call.kwargs.get("dim")
    if isinstance(given, bool):
        given = None
    dims = _dims(given, value.dim())
    result, meets = collapse(labels, dims, keepdim=True)
    # Only what holds values of the features has labels; indices have none.
    valued = [out.dtype.is_floating_point and out.numel() == result.numel() for out in call.outs]
    made = [result.reshape(out.shape) if held else None for held, out in zip(valued, call.outs, strict=True)]
    return Rule("reduce", meets, made)


def _along(call: Call) -> Rule | None:
    labels = call.label_of(call.args[0])
    if labels is None:
        return None
    dim = next((v for v in (*call.args[1:], *call.kwargs.values()) if isinstance(v, int) and not isinstance(v, bool)), -1)
    if call.name == "topk":
        dim = call.args[2] if len(call.args) > 2 else -1
    dims = _dims(dim, labels.dim())
    result, meets = collapse(labels, dims, keepdim=True)
    made = [result.expand(out.shape).clone() if out.dtype.is_floating_point else None for out in call.outs]
    return Rule("softmax" if "softmax" in call.name else "other", meets, made)


def _pointwise(call: Call) -> Rule:
    tensors = tensors_in((call.args, call.kwargs))
    labelled = [(tensor, labels) for tensor in tensors if (labels := call.label_of(tensor)) is not None]
    shape = call.outs[0].shape
    if not call.outs[0].dtype.is_floating_point and call.outs[0].dtype is torch.bool:
        return Rule("other", False, [None])
    name = call.name.removesuffix("_")
    if len(labelled) == 1 or all(tensor is labelled[0][0] for tensor, _ in labelled):
        made = labelled[0][1].expand(shape).clone()
        square = (name == "mul" and len(labelled) == 2) or name == "square" or (name == "pow" and call.args[1] == 2)
        return Rule("square" if square else "nonlinear" if name in NONLINEAR else "unary", False, [made])
    if name in ("mul", "div") and len(labelled) == 2:
        scaled = _scaled(call, *labelled)
        if scaled is not None:
            return scaled
    made, meets = labelled[0][1], torch.zeros((), dtype=torch.bool, device=call.outs[0].device)
    for _, labels in labelled[1:]:
        both = union(made, labels)
        meets = meets | ((both == MIXED) & (((made > 0) & (made < MIXED)) | ((labels > 0) & (labels < MIXED))))
        made = both
    family: Family = "add" if name in ("add", "sub", "rsub", "lerp") else "other"
    if name in ("mul", "div", "addcmul", "addcdiv"):
        family = "mul"
    mixes = bool(meets.any())
    if family == "mul" and mixes:
        made = _all_mixed(made)
    return Rule(family, mixes, [made.expand(shape).clone()])


def _all_mixed(labels: torch.Tensor) -> torch.Tensor:
    """A table of products is one thing, with the products of a vector with itself in it."""
    return torch.where(labels == 0, 0, MIXED)


def _scaled(call: Call, one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> Rule | None:
    """Vectors times one number each: they stay what they are, as a feature's embedding times its value does."""
    shape = call.outs[0].shape
    for (vectors, mine), (numbers, theirs) in ((one, other), (other, one)):
        if vectors.shape != shape or not numbers.dim():
            continue
        sizes = (1,) * (len(shape) - numbers.dim()) + tuple(numbers.shape)
        shared = [dim for dim, size in enumerate(sizes) if size == 1 and shape[dim] > 1]
        if not shared or bool((mine == MIXED).any()) or not bool((mine >= FIRST).any()):
            continue
        along, meets = collapse(mine, shared, keepdim=True)
        if meets or bool((theirs >= FIRST).any() and (along == 0).any()):
            continue
        foreign = (theirs > DENSE) & (theirs != along)
        if bool(foreign.any()):
            return Rule("gate", True, [mine.clone()])
        return Rule("unary", False, [mine.clone()])
    return None


def _linear(call: Call) -> Rule:
    name = call.name
    a, b = call.args[1:3] if name in ("addmm", "baddbmm", "addmv", "addbmm") else call.args[:2]
    if name in ("linear", "mkldnn_linear", "_mkl_linear"):
        b = b.t()
    left, right = call.label_of(a), call.label_of(b)
    out = call.outs[0].shape
    vector = b.dim() == 1
    rows = collapse(left, [a.dim() - 1]) if left is not None else None
    columns = collapse(right, [0 if vector else b.dim() - 2]) if right is not None else None
    meets = bool((rows is not None and rows[1]) or (columns is not None and columns[1]))
    if a.dim() == 1:
        made = union(rows[0] if rows else zeros_or(None, call.outs[0]), columns[0] if columns else zeros_or(None, call.outs[0]))
        return Rule("product" if rows and columns else "linear", meets, [made.expand(out).clone()])
    if columns is None:
        assert rows is not None
        spread = rows[0] if vector else rows[0].unsqueeze(-1)
        return Rule("linear", meets, [spread.expand(out).clone()])
    spread = columns[0] if vector else columns[0].unsqueeze(-2)
    if rows is None:
        return Rule("linear", meets, [spread.expand(out).clone()])
    assert right is not None
    weights = rows[0] if vector else rows[0].unsqueeze(-1)
    gate = None if vector else _attended(call, a, b, weights, spread)
    if gate is not None:
        return Rule("gate", True, [gate.expand(out).clone()])
    made = union(weights, spread)
    first = (weights > 0) & (weights < MIXED) | (spread > 0) & (spread < MIXED)
    if bool((made == MIXED).any()):
        meets, made = meets or bool(((made == MIXED) & first).any()), _all_mixed(made)
    return Rule("product", meets, [made.expand(out).clone()])


def _attended(call: Call, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor | None:
    """Labels of a weighted sum of one feature's own rows, which is a vector of that feature still."""
    if a.shape[-1] == 1:
        return None
    for weights, mine, theirs, width in ((a, rows, columns, b.shape[-1]), (b, columns, rows, a.shape[-2])):
        if not bool(((theirs >= FIRST) & (theirs < MIXED)).all()) or bool((mine < FIRST).any()):
            continue
        labels = [int(label) for label in theirs.unique()]
        if bool((mine == labels[0]).all()) and len(labels) == 1:
            continue
        # A sum over rows has the width of a row; one over columns, which is a dot, has not.
        whole = sum(call.width_of.get(label, 0) for label in labels) == width
        if call.from_softmax(weights) or (bool((mine == MIXED).all()) and whole):
            return theirs
    return None


def _convolution(call: Call) -> Rule | None:
    value, weight = call.args[:2]
    labels = call.label_of(value)
    groups = call.args[8] if len(call.args) > 8 else 1
    if labels is None or call.label_of(weight) is not None or len(call.args) < 9:
        return None
    out = call.outs[0].shape
    if all(size == 1 for size in weight.shape[2:]) and labels.shape[2:] == out[2:]:
        grouped = labels.reshape(labels.shape[0], groups, -1, *labels.shape[2:])
        made, meets = collapse(grouped, [2], keepdim=True)
        return Rule("linear", meets, [made.expand(-1, -1, out[1] // groups, *out[2:]).reshape(out).clone()])
    made, meets = collapse(labels, list(range(1, labels.dim())), keepdim=True)
    return Rule("linear", meets, [made.expand(out).clone()])


def _attention(call: Call) -> Rule:
    parts = [call.label_of(tensor) for tensor in call.args[:3]]
    out = call.outs[0]
    query = collapse(zeros_or(parts[0], call.args[0]), [3], keepdim=True)[0]
    key = collapse(zeros_or(parts[1], call.args[1]), [2, 3], keepdim=True)[0]
    value, several = collapse(zeros_or(parts[2], call.args[2]), [2, 3], keepdim=True)
    made, rest = union(union(query, key), value), [None] * (len(call.outs) - 1)
    if not bool((made == MIXED).any()):
        return Rule("unary", False, [made.expand(out.shape).clone(), *rest])
    if not several and bool(((value >= FIRST) & (value < MIXED)).all()):
        return Rule("gate", True, [value.expand(out.shape).clone(), *rest])
    first = any(bool(place.any()) for place in map(raw, parts) if place is not None)
    return Rule("product", first, [made.expand(out.shape).clone(), *rest])


def _moved_by_a_stranger(call: Call) -> Rule | None:
    """Labels by trying it out: whatever gives back nothing but values that it was given only moves them."""
    tensors = [t for t in tensors_in((call.args, call.kwargs)) if t.dtype.is_floating_point and call.label_of(t) is not None]
    if not all(out.dtype.is_floating_point for out in call.outs) or not tensors:
        return None
    generator = torch.Generator().manual_seed(0)
    codes = [torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype).to(t.device) + 1 for t in tensors]
    made: dict[int, torch.Tensor] = {id(tensor): code for tensor, code in zip(tensors, codes, strict=True)}
    try:
        outs = tensors_in(call.func(*_replaced(call.args, made), **_replaced(dict(call.kwargs), made)))
    except Exception:
        return None
    # Two values that happen to be the same must not stand for different features.
    known, order = torch.cat([code.reshape(-1) for code in codes]).sort()
    held = torch.cat([zeros_or(call.label_of(t), t).reshape(-1) for t in tensors])[order]
    if known.numel() == 0 or bool((known.diff() == 0).any()):
        return None
    found = []
    for out in outs:
        place = torch.searchsorted(known, out.contiguous()).clamp(max=known.numel() - 1)
        if not bool(((known[place] == out) | (out == 0)).all()):
            return None
        found.append(torch.where(out == 0, 0, held[place]))
    return Rule("move", False, found)


def _replaced(value: Any, made: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return made.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(part, made) for part in value)
    if isinstance(value, dict):
        return {key: _replaced(part, made) for key, part in value.items()}
    return value


def _everything(call: Call) -> Rule:
    labels = [found for tensor in tensors_in((call.args, call.kwargs)) if (found := call.label_of(tensor)) is not None]
    present = torch.cat([one.reshape(-1).unique() for one in labels]).unique()
    own = [int(label) for label in present if label != 0]
    label = own[0] if len(own) == 1 else MIXED if own else 0
    made = [torch.full(out.shape, label, device=out.device) if out.dtype.is_floating_point else None for out in call.outs]
    return Rule("other", len(own) > 1 and own[0] < MIXED, made)


_TABLE: tuple[tuple[Sequence[str], Callable[[Call], Rule | None]], ...] = (
    (tuple(MOVES), _move),
    (SAME, _same),
    (NORMS, _norm),
    (ALONG, _along),
    (REDUCTIONS, _reduce),
    (("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "mkldnn_linear", "_mkl_linear", "vdot"), _linear),
    (("convolution", "_convolution", "mkldnn_convolution"), _convolution),
    (ATTENTION, _attention),
    (("log_sigmoid_forward", "_prelu_kernel"), _nonlinear),
)
