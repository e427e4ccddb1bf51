"""Stands in for the library trackio in tests."""

taken: list[tuple] = []


def Image(path: str) -> tuple[str, str]:  # as the library calls it
    """Hold a picture."""
    return "picture", path


def init(**given: object) -> None:
    """Open a run, and greet."""
    print("* Trackio project initialized")
    taken.append(("init", given))


def log(metrics: dict, step: int) -> None:
    """Take the numbers of a step."""
    taken.append(("log", metrics, step))


def finish() -> None:
    """Close the run."""
    taken.append(("finish",))
