"""Stands in for the library apprise in tests: keeps messages, refuses them, raises, or never returns."""

import threading

taken: list[dict] = []
behaviour = "take"  # or "refuse", "raise", "hang"
release = threading.Event()  # lets what hangs go


class AppriseAsset:
    """What the library takes of its user."""

    def __init__(self, **given: object) -> None:
        self.given = given


class Apprise:
    """The addresses of messages."""

    def __init__(self, asset: AppriseAsset) -> None:
        self.addresses: list[str] = []

    def add(self, address: str) -> bool:
        """Take an address of a kind that it knows."""
        self.addresses.append(address)
        return not address.startswith("unknown")

    def notify(self, body: str, title: str, attach: list[str] | None) -> bool:
        """Deliver a message."""
        if behaviour == "hang":
            release.wait(60)
        if behaviour == "raise":
            raise KeyError(f"POST {self.addresses[0]} and https://chat.example/api/{self.addresses[0].split('/')[-1]}")
        taken.append({"title": title, "body": body, "attach": attach, "to": list(self.addresses)})
        return behaviour != "refuse"
