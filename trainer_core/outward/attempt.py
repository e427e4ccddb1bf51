"""Call another library, whose errors nobody knows beforehand, and keep what it raises as a sentence without secrets."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType

from ..common.wording import printable
from .masked import masked

LONGEST = 300  # characters of an error


class Attempt:
    """A `with` block of another library's code: its exceptions end the block, and `problem` says why.

    Only these are swallowed, as nobody lists them: what a person or the system ends goes on its way.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        self.problem = ""  # "" while nothing went wrong
        self._secrets = secrets

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, _: TracebackType | None
    ) -> bool:
        if isinstance(problem, Exception | SystemExit):
            said = masked(str(problem).strip(), self._secrets).partition("\n")[0]
            said = printable(said)[:LONGEST].rstrip(". ")
            self.problem = said or type(problem).__name__
            return True
        return False
