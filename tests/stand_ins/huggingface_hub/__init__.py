"""Stands in for the library huggingface_hub in tests: a hub that lies in memory."""

from pathlib import Path
from types import SimpleNamespace

from .utils import RepositoryNotFoundError

repositories: dict[str, SimpleNamespace] = {}
problem: Exception | None = None


class CommitOperationAdd:
    """A file of a change."""

    def __init__(self, path_in_repo: str, path_or_fileobj: str | bytes) -> None:
        self.name, self.file = path_in_repo, path_or_fileobj


class HfApi:
    """Takes repositories and changes."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def whoami(self) -> dict:
        """Name the owner of the token."""
        return {"name": "somebody"}

    def model_info(self, name: str) -> SimpleNamespace:
        """Describe a repository."""
        if name not in repositories:
            raise RepositoryNotFoundError(name)
        return repositories[name]

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        """Make a repository."""
        if problem:
            raise problem
        fresh = SimpleNamespace(private=private, siblings=[], tags=[], files={}, messages=[], token=self.token)
        repositories.setdefault(name, fresh)
        return f"https://hub.example/{name}"

    def create_commit(self, name: str, operations: list[CommitOperationAdd], commit_message: str) -> None:
        """Take a change."""
        known = repositories[name]
        for each in operations:
            data = each.file if isinstance(each.file, bytes) else Path(each.file).read_bytes()
            known.files[each.name] = data
        known.siblings = [SimpleNamespace(rfilename=each) for each in known.files]
        known.tags = ["lora-atelier"] if b"\n- lora-atelier\n" in known.files["README.md"] else []
        known.messages.append(commit_message)
