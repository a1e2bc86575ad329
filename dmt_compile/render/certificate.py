"""A certificate as text and as a rich table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .text import to_text

if TYPE_CHECKING:
    from ..verify.certificate import Certificate


def certificate_renderable(certificate: Certificate) -> RenderableType:
    """A headline and one row per check; the text of a failed check follows in full."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for name in ("", "check", "compared", "found"):
        table.add_column(name, overflow="fold")
    for check in certificate.checks:
        table.add_row(
            Text("ok", style="green") if check.passed else Text("FAIL", style="bold red"),
            Text(check.name),
            Text(check.how),
            Text(check.found if check.passed else "see below"),
        )
    sizes = ", ".join(map(str, certificate.batch_sizes[:16])) + (", ..." if len(certificate.batch_sizes) > 16 else "")
    verdict = "equals the flat model" if certificate.passed else "DIFFERS from the flat model"
    parts: list[RenderableType] = [
        Text(f"Certificate: {certificate.subject} {verdict}", style="bold green" if certificate.passed else "bold red"),
        Text(f"plan {certificate.plan_hash[:12]}, samples per rank: {sizes}"),
        table,
    ]
    parts += [Text(f"{check.name}: {check.found}", style="red") for check in certificate.checks if not check.passed]
    return Group(*parts)


def certificate_text(certificate: Certificate) -> str:
    """The certificate at 80 columns without colour."""
    return to_text(certificate_renderable(certificate))
