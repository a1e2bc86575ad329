"""Where inductor puts dense work: between the start and the wait of the exchange that takes longest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .owners import RANKS


def during_longest_exchange(order: list[Any]) -> list[Any]:
    """A pass over inductor's schedule: what needs no exchange runs while the last one over the slowest links is under way.

    First comes what that exchange needs to start, earlier exchanges with it; then all that needs no later result; then the rest, in
    the order that it had. The slowest links are those between hosts, which the peer exchange uses (section 3.1): in forward it is
    the last exchange of a round, in backward the first, and dense gradients are computed meanwhile.
    """
    groups = _slowest()
    starts = [place for place, one in enumerate(order) if _group(one) in groups]
    if not starts:
        return order
    maker = {name: place for place, one in enumerate(order) for name in one.get_buffer_names()}
    needs = [{maker[dep.name] for dep in one.unmet_dependencies if dep.name in maker} - {at} for at, one in enumerate(order)]
    first: set[int] = set()
    # Exchanges keep their order, which is the same on all ranks.
    waiting = [place for place in range(starts[-1] + 1) if _group(order[place]) is not None]
    while waiting:
        place = waiting.pop()
        if place not in first:
            first.add(place)
            waiting.extend(needs[place])
    late: set[int] = set()
    for place, one in enumerate(order):
        if place not in first and (_group(one) is not None or _waits(one) or not needs[place].isdisjoint(late)):
            late.add(place)
    free = [place for place in range(len(order)) if place not in first and place not in late]
    return [order[place] for place in (*sorted(first), *free, *sorted(late))]


def _slowest() -> set[str]:
    """The names of the groups that exchange over the slowest links: between hosts, where there are several."""
    groups = [ranks.groups for ranks in RANKS.values()]
    return {str((own.peer if own.peer.size() > 1 else own.tower).group_name) for own in groups}


def _parts(one: Any) -> Iterable[Any]:
    """The operations of an entry of the schedule, which may be a group of entries."""
    return [part.node for part in one.get_nodes() if part.node is not None]


def _group(one: Any) -> str | None:
    """The group of the collective that an entry starts; None for any other entry."""
    from torch._inductor.utils import is_collective

    for node in _parts(one):
        if is_collective(node):
            names = [value for value in (*node.constant_args, *node.kwargs.values()) if isinstance(value, str)]
            return names[-1] if names else ""
    return None


def _waits(one: Any) -> bool:
    from torch._inductor.utils import is_wait

    return any(is_wait(node) for node in _parts(one))


__all__ = ["during_longest_exchange"]
