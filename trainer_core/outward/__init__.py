"""What a run tells other programs, where a person has switched that on; every byte on a network is a library's."""

from .attempt import Attempt
from .event import MESSAGES, About, Event
from .hub import upload
from .masked import mask_logs, masked
from .sender import Sender
from .services import SERVICES, ServiceRow, build_senders, deliver, finite_only
from .settings import Outward, ServiceSettings, read_outward, usual_file, write_outward

__all__ = [
    "MESSAGES",
    "SERVICES",
    "About",
    "Attempt",
    "Event",
    "Outward",
    "Sender",
    "ServiceRow",
    "ServiceSettings",
    "build_senders",
    "deliver",
    "finite_only",
    "mask_logs",
    "masked",
    "read_outward",
    "upload",
    "usual_file",
    "write_outward",
]
