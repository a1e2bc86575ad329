"""From a tape to interactions: which operators first mix features, and which of them belong together as one kind."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator

from ..errors import source_location
from . import crosses, pairs
from .block import block_of
from .flow import Group, contraction, ends, is_calm, weighted_by_softmax
from .labels import MIXED
from .records import Interaction
from .tape import Op, Tape

_ATTENTION = "_scaled_dot_product"
_PRODUCTS = ("inner product", "element-wise product", "factorisation machine")


def recognise(tape: Tape) -> tuple[Interaction, ...]:
    """All interactions of a run, in the order of the graph, linear terms last."""
    finder = _Finder(tape)
    groups = finder.find()
    made = [_record(tape, group) for group in groups]
    order = {node.name: place for place, node in enumerate(tape.held)}
    return tuple(sorted(made, key=lambda one: (one.kind == "linear term", order.get(one.node, 0))))


class _Finder:
    """Claims the operators that mix features, kind by kind; what is left over is opaque."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        # What a forward only looks at, to take one way or another, is no interaction.
        used = None if tape.results is None else {op.index for op in tape.before(tape.results)}
        mixing = (op for op in tape.ops if op.mixes and self._takes_lookup(op))
        self.left: dict[int, Op] = {op.index: op for op in mixing if used is None or op.index in used}
        self.groups: list[Group] = []

    def _takes_lookup(self, op: Op) -> bool:
        return any(self.tape.lookups(number) for number in op.ins)

    def find(self) -> list[Group]:
        tape = self.tape
        self._self_attention()
        self._gates()
        self._sum_squares()
        self._pairs()
        self._crosses()
        self._layers()
        self._sums()
        for op in self._of("mul", "product"):
            before = {o.index for n in tape.labelled(op) for o in tape.before([n], lambda o: not is_calm(o))}
            for group in self.groups:
                if group.kind in _PRODUCTS and any(o.index in before for o in group.main):
                    group.main.append(op)
                    self.left.pop(op.index, None)
        for op in list(self.left.values()):
            if op.index not in self.left:
                continue
            # A recurrent layer is written with sums and products of all kinds.
            inside = [g for g in self.groups if g.kind == "field sum" and {o.node for o in g.main} == {op.node}]
            for group in inside:
                self.groups.remove(group)
                self._add(Group("opaque", op.name.removesuffix("_").strip("_").replace("_", " "), group.main, group.ops))
            self._add(Group("opaque", op.name.removesuffix("_").strip("_").replace("_", " "), [op]), merge=True)
        return self.groups

    def _add(self, group: Group, *, merge: bool = False) -> None:
        """Keep a group, or let it join one of the same kind, variant and, for sums of layers, the same vectors."""
        for op in (*group.main, *group.ops):
            self.left.pop(op.index, None)
        if merge:
            for other in self.groups:
                if (other.kind, other.variant) == (group.kind, group.variant) and self._meet(other, group):
                    other.main += group.main
                    other.ops += group.ops
                    return
        self.groups.append(group)

    def _meet(self, one: Group, other: Group) -> bool:
        if one.kind == "linear term":
            return True
        mine, theirs = self._features(one.main), self._features(other.main)
        if one.kind == "gating":
            mine, theirs = (self.tape.origin(group.main[0].outs[0]) for group in (one, other))
        return mine == theirs or (one.kind not in ("concat-MLP",) and bool(mine & theirs))

    def _features(self, ops: Iterable[Op]) -> frozenset[int]:
        return frozenset(label for op in ops for number in op.ins for label in self.tape.lookups(number))

    def _unclaimed_before(self, starts: Iterable[int]) -> list[Op]:
        return [op for op in self.tape.before(starts) if op.index in self.left]

    def _of(self, *families: str) -> Iterator[Op]:
        """What is left over of these families, while others may be claimed."""
        return (op for op in list(self.left.values()) if op.family in families and op.index in self.left)

    # Attention and gates

    def _self_attention(self) -> None:
        """Weights from products of the vectors with each other, by softmax, over the vectors themselves."""
        tape = self.tape
        main: list[Op] = []
        rest: list[Op] = []
        for op in list(self.left.values()):
            if op.name.startswith(_ATTENTION) and op.family == "product":
                main.append(op)
        for op in tape.ops:
            if op.family != "product" or op.name.startswith(_ATTENTION):
                continue
            softmax = next((s for number in tape.labelled(op) if (s := weighted_by_softmax(tape, number)) is not None), None)
            if softmax is None:
                continue
            scores = next((o for o in tape.before(softmax.ins, lambda o: o.family == "product") if o.family == "product"), None)
            if scores is None or (scores.index not in self.left and op.index not in self.left):
                continue
            if len(self._features([scores])) > 1:
                main.append(scores)
                rest.append(op)
        if not main:
            return
        # Later layers take what the first have made, beside the vectors themselves.
        made = {op.index for op in (*main, *rest)}
        for op in self._of("add", "product", "other"):
            if any(before.index in made for before in tape.before(op.ins)) and self._features([op]) <= self._features(main):
                rest.append(op)
        layers = self._depth(main, tape)
        self._add(Group("self-attention", f"{layers} layers" if layers > 1 else "", main, rest))

    def _depth(self, main: list[Op], tape: Tape) -> int:
        products = [op for op in tape.ops if op.name.startswith(_ATTENTION) and op.family == "product"]
        products += [op for op in tape.ops if op.family == "softmax" and op.mixes is False and tape.mixed(op.ins[0])]
        reached = {op.index for op in main}
        depth: dict[int, int] = {}
        for op in sorted(products, key=lambda o: o.index):
            before = {o.index for o in tape.before(op.ins)}
            if before & reached or op.index in reached:
                depth[op.index] = 1 + max((depth[index] for index in depth if index in before), default=0)
        return max(depth.values(), default=1)

    def _gates(self) -> None:
        """Vectors times a number each, which comes from other vectors; and weighted sums of one feature's own rows."""
        tape = self.tape
        for op in self._of("gate"):
            kept = next((n for n in tape.labelled(op) if tape.present(n) >= tape.present(op.outs[0])), op.ins[0])
            claimed = self._unclaimed_before([n for n in tape.labelled(op) if n != kept])
            inner = [o for o in claimed if o is not op]
            softmax = any(weighted_by_softmax(tape, n) is not None for n in op.ins) or op.name.startswith(_ATTENTION)
            # The operands are those of all its parts: who asks, and what is weighted.
            if tape.per_sample(kept) > sum(tape.sources[label].width for label in tape.own(kept)) > 0:
                self._add(Group("attention over a history", "softmax" if softmax else "", [*inner, op]), merge=True)
            else:
                self._add(Group("gating", "softmax" if softmax else "", [op], inner), merge=True)

    # Sums and squares

    def _sum_squares(self) -> None:
        """Half the square of a sum less the sum of squares."""
        tape = self.tape
        for square in [op for op in tape.ops if op.family == "square"]:
            summed = tape.makers.get(tape.back(square.ins[0], is_calm))
            if summed is None or summed.index not in self.left or summed.family not in ("reduce", "add", "linear"):
                continue
            # With a matrix of weights the sums are layers.
            kinds = (summed.family, "reduce", "add") if summed.family == "linear" else ("reduce", "add")
            for number, less in tape.after(square.outs, lambda o: is_calm(o) or o.family == "reduce"):
                other = [n for n in tape.labelled(less) if n != number]
                if less.family != "add" or len(other) != 1:
                    continue
                squares = list(tape.before(other, lambda o: o.family == "square"))
                if not any(o.family == "square" and not tape.mixed(o.ins[0]) for o in squares):
                    continue
                sums = [o for o in tape.before(summed.outs) if o.index in self.left and o.family in kinds]
                rest = [o for o in squares if o.index in self.left]
                _, last = ends(tape, [less])
                left = max((tape.per_sample(n) for n in last), default=1)
                pooled = left > 1 and left == tape.per_sample(less.outs[0])
                main = sorted(sums, key=lambda o: o.index)
                self._add(Group("factorisation machine", "bi-interaction, sum-square" if pooled else "sum-square", main, rest))
                break

    # Products of vectors

    def _pairs(self) -> None:
        tape = self.tape
        found = [op for op in self._of("mul", "product", "other") if self._is_pair(op) and not pairs.is_outer_of_all(tape, op)]
        for one in pairs.collect(tape, found):
            group = pairs.classify(tape, one)
            if group.kind == "compressed interaction":
                deeper = [op for op in self._of("mul", "product") if op not in one.ops and pairs.compresses(tape, op)]
                layers = 1 + len(deeper)
                group = Group(group.kind, f"{layers} layers" if layers > 1 else "1 layer", group.main, deeper)
            self._add(group)

    def _is_pair(self, op: Op) -> bool:
        taken = pairs.operands(self.tape, op)
        if taken is None or (op.family == "other" and op.name != "_trilinear"):
            return False
        return all(MIXED not in self.tape.present(number) and self.tape.own(number) for number in taken)

    def _crosses(self) -> None:
        for group in crosses.find(self.tape, list(self._of("mul", "product"))):
            layers = {op.index for op in group.main}
            claimed = [o for op in group.main for o in self._unclaimed_before(op.ins)]
            # The vectors added again to what has been made of them.
            claimed += [o for o in self._of("add") if any(b.index in layers for b in self.tape.before(o.ins))]
            group.ops = _without(claimed, layers)
            self._add(group)

    # Layers and sums

    def _layers(self) -> None:
        """Layers over vectors that lie side by side."""
        tape = self.tape
        for op in self._of("linear"):
            (taken, *_) = tape.labelled(op)
            if all(tape.sources[label].width == 1 for label in tape.lookups(taken)):
                self._add(Group("linear term", "", [op]), merge=True)
            elif self._across(op, taken):
                self._add(Group("opaque", "a layer across the vectors, column by column", [op]), merge=True)
            else:
                self._add(self._joined(op) or Group("concat-MLP", self._how_deep(op, taken), [op]), merge=True)

    def _across(self, op: Op, taken: int) -> bool:
        """Whether a layer sums over vectors, but not over their columns."""
        widths = {self.tape.sources[label].width for label in self.tape.lookups(taken)} - {1}
        vectors = len(self.tape.own(taken))
        return bool(widths) and contraction(self.tape, op) < min(widths) * max(vectors - 1, 1)

    def _how_deep(self, op: Op, taken: int) -> str:
        deep = any(o.family == "nonlinear" for _, o in self.tape.after(op.outs, is_calm)) or self._leads_on(op)
        words = [] if deep else ["one linear layer"]
        if self.tape.mixed(taken):
            words.append("beside the results of others")
        return ", ".join(words)

    def _leads_on(self, op: Op) -> bool:
        return any(o.family == "linear" for _, o in self.tape.after(op.outs, is_calm))

    def _joined(self, op: Op) -> Group | None:
        """A dot of what two layers have made: two towers, or vectors that a layer has made from all."""
        tape = self.tape
        mine = tape.origin(op.outs[0])
        for number, user in tape.after(op.outs, lambda o: tape.origin(o.outs[0]) == mine if o.outs else False):
            others = [n for n in tape.factors(user) if n != number]
            if user.family not in ("product", "mul") or len(others) != 1:
                continue
            if any(weighted_by_softmax(tape, n) is not None for n in (number, *others)):
                continue
            theirs = tape.origin(others[0])
            if theirs and not mine & theirs:
                if user.family == "product" or any(o.family == "reduce" for _, o in tape.after(user.outs, is_calm)):
                    return Group("concat-MLP", "a tower, joined by a dot", [op])
            elif user.family == "product" and mine == theirs and tape.mixed(others[0]) and contraction(tape, user) > 1:
                partners = [o for o in tape.before(others) if o.index in self.left and o.family == "linear" and o is not op]
                if partners:
                    return Group("pairwise dot", "of vectors that an MLP makes from all", [op, *partners], [user])
        return None

    def _sums(self) -> None:
        tape = self.tape
        done: list[Group] = []
        for op in self._of("add", "reduce", "other"):
            wide = max((tape.sources[label].width for n in op.ins for label in tape.lookups(n)), default=0)
            before = {o.index for o in tape.before(op.ins)}
            if op.family == "other":
                continue
            if wide == 1 or (wide > 1 and all(self._is_scalar(n) for n in op.ins if tape.lookups(n)) and op.family == "add"):
                self._add(Group("linear term", "", [op]), merge=True)
                continue
            joined = next((g for g in done if any(o.index in before for o in g.main)), None)
            if joined is not None:
                joined.main.append(op)
                self.left.pop(op.index)
            elif op.family == "add" and any(tape.mixed(n) for n in op.ins) and self._residual(op, before):
                self.left.pop(op.index)
            else:
                name = {"amax": "max", "amin": "min"}.get(op.name, op.name) if op.family == "reduce" else "sum"
                group = Group("field sum", "" if name == "sum" else name, [op])
                outer = self._outer_of(op)
                if outer is not None:
                    group = Group("outer product", "of the sum of the vectors", [op], [outer])
                self._add(group)
                done.append(group)

    def _outer_of(self, op: Op) -> Op | None:
        """The outer product of a sum with itself."""
        for _, user in self.tape.after(op.outs, is_calm):
            taken = self.tape.factors(user)
            summed = {self.tape.back(number, is_calm) for number in taken}
            size = self.tape.per_sample(op.outs[0])
            if (
                user.family in ("mul", "product")
                and summed == {op.outs[0]}
                and self.tape.per_sample(user.outs[0]) == size * size > 1
            ):
                return user
        return None

    def _is_scalar(self, number: int) -> bool:
        return self.tape.per_sample(number) == 1

    def _residual(self, op: Op, before: set[int]) -> bool:
        """Whether vectors are added to what an interaction has made of them."""
        mine = self._features([op])
        return any(mine <= self._features(g.main) and any(o.index in before for o in (*g.main, *g.ops)) for g in self.groups)


def _without(ops: Iterable[Op], indices: set[int]) -> list[Op]:
    return [op for op in {op.index: op for op in ops}.values() if op.index not in indices]


def _record(tape: Tape, group: Group) -> Interaction:
    main = sorted(group.main, key=lambda op: op.index)
    every = {op.index: op for op in (*main, *group.ops)}
    nodes = list(dict.fromkeys(every[index].node for index in sorted(every)))
    node = main[0].node
    location = source_location(node)
    text = ""
    if location is not None:
        file, _, line = location.rpartition(":")
        text = linecache.getline(file, int(line)).strip()
    order = {one: place for place, one in enumerate(tape.held)}
    nodes.sort(key=lambda one: order.get(one, len(order)))
    names = tuple(one.name for one in nodes)
    block = block_of(tape, main, apart=group.kind == "attention over a history")
    return Interaction(group.kind, group.variant, block, node.name, names, location, text)
