"""The nodes of the network, the optimizer and its schedule."""

from __future__ import annotations

from .form import Form

FORMS: dict[str, Form] = {}
