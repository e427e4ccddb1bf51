"""The nodes of the base model and the pictures."""

from __future__ import annotations

from .form import Form

FORMS: dict[str, Form] = {}
