"""The nodes of the objective, and of the run itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..objective import ObjectiveConfig
from ..rows import Row, rows_of
from .form import Form, form


def _objective() -> Iterable[Row]:
    """Put the two settings of pyramid noise behind a switch."""
    for each in rows_of(ObjectiveConfig).values():
        if each.name == "pyramid_iterations":
            yield Row(
                name="pyramid_noise",
                choices=("off", "on"),
                default="off",
                words="Adds noise of coarser and coarser patches, which changes the brightness of whole areas "
                "(multi-resolution noise). off (default), or on for contrast instead of a noise offset.",
                advanced=True,
                optional=True,
            )
            yield replace(each, default=6, low=1)  # usual, once it is on
        else:
            yield each


FORMS: dict[str, Form] = {
    "AtelierObjective": form("Noise & Loss", _objective(), "OBJECTIVE"),
}
