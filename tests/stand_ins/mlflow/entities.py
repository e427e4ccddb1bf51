"""The values that mlflow takes."""

from typing import NamedTuple


class Param(NamedTuple):
    """A setting."""

    key: str
    value: str


class Metric(NamedTuple):
    """A number of a step."""

    key: str
    value: float
    timestamp: int
    step: int
