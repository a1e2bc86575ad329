"""Which lookups a tower's module takes and what it makes of them, as plain records."""

from __future__ import annotations

from dataclasses import dataclass

HOLDER = "dmt_towers"
"""The submodule of a tower model that holds the tower modules, by the number of their tower."""

EXPANSIONS = "dmt_expansions"
"""The submodule of a tower model that holds what brings vectors back to their old width, by the number of their tower."""


@dataclass(frozen=True)
class TowerVectors:
    """The module of ``tower``: it takes the vectors of ``lookups``, in this order, ``widths`` columns each.

    It makes ``vectors`` vectors of ``width`` columns; ``target`` is its name in the tower model.
    """

    tower: int
    lookups: tuple[str, ...]
    widths: tuple[int, ...]
    vectors: int
    width: int
    passes: bool

    @property
    def target(self) -> str:
        return f"{HOLDER}.{self.tower}"

    @property
    def columns(self) -> int:
        """Columns that it makes per sample: O_t."""
        return self.vectors * self.width

    @property
    def equal_widths(self) -> bool:
        """Whether it is given (rows, features, width), and not (rows, columns)."""
        return len(set(self.widths)) == 1
