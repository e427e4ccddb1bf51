"""Keep tokens and addresses out of whatever is written or shown: notes, answers, and what libraries log."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable

HIDDEN = "***"
SHORTEST = 8  # characters of a part that may be a token
SHORTEST_OF_A_LOGIN = 4  # the same before an @, where a password stands
_LIBRARIES = ("apprise", "huggingface_hub", "mlflow", "trackio", "wandb")  # loggers that may have handlers of their own
_DOMAIN = re.compile(r"localhost|[\w-]+(\.[\w-]+)*\.[A-Za-z]{2,}|[0-9]+(\.[0-9]+){3}")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_PERCENT = re.compile("%([0-9A-Fa-f]{2})")


def masked(text: str, secrets: Iterable[str]) -> str:
    """Replace each secret in a text, and each part of an address that may be a token, by three stars."""
    for part in sorted(_parts(secrets), key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    return text


def _parts(secrets: Iterable[str]) -> set[str]:
    """List what must not be read of secrets: of an address also login, path and query, as libraries write these."""
    found: set[str] = set()
    for secret in filter(None, (word for each in secrets for word in (each, *each.split()))):
        found.add(secret)
        address = _SCHEME.sub("", secret)
        if address == secret:
            continue
        login = address.rpartition("@")[0]
        pieces = {piece: SHORTEST for piece in re.split(r"[/:@?&=#,]+", address)}
        pieces |= {piece: SHORTEST_OF_A_LOGIN for piece in re.split(r"[/:@]+", login)}
        pieces[address] = SHORTEST
        found |= {piece for piece, least in pieces.items() if len(piece) >= least and not _DOMAIN.fullmatch(piece)}
    return found | {_PERCENT.sub(lambda match: chr(int(match[1], 16)), part) for part in found}


class _Masking(logging.Filter):
    """Masks each line that a handler writes."""

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__()
        self.secrets = set(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the message of a record, and the traceback in it."""
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_text = masked(record.exc_text, self.secrets) if record.exc_text else record.exc_text
        record.msg, record.args = masked(record.getMessage(), self.secrets), ()
        return True


_masking = _Masking(())


def mask_logs(secrets: Iterable[str]) -> None:
    """Mask secrets in all that this process logs from now on, whoever logs it."""
    _masking.secrets |= set(filter(None, secrets))
    named = [logging.getLogger(), *map(logging.getLogger, _LIBRARIES)]
    for handler in [logging.lastResort, *(handler for logger in named for handler in logger.handlers)]:
        if handler is not None and _masking not in handler.filters:
            handler.addFilter(_masking)
