"""The errors of the hub."""


class RepositoryNotFoundError(Exception):
    """There is no repository of that name."""
