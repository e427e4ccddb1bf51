"""Stands in for the library wandb in tests."""

taken: list[tuple] = []


def Image(path: str) -> tuple[str, str]:  # as the library calls it
    """Hold a picture."""
    return "picture", path


def Settings(**given: object) -> dict:
    """Hold settings."""
    return given


class Run:
    """An open run."""

    def log(self, metrics: dict, step: int) -> None:
        """Take the numbers of a step."""
        taken.append(("log", metrics, step))

    def finish(self, exit_code: int) -> None:
        """Close the run."""
        taken.append(("finish", exit_code))


def init(**given: object) -> Run:
    """Open a run."""
    taken.append(("init", given))
    return Run()
