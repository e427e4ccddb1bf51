"""Who may import whom: data flows one way through trainer_core, and only the bridge touches ComfyUI."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each row imports only from rows above it, not from its own row. Imports for type checkers alone are free.
ROWS = [
    {"config", "rng", "callbacks", "smooth", "files", "state"},
    {"buckets", "captions", "caption_files", "expression"},
    {"images", "caption_tables"},
    {"masks"},
    {"scan"},
    {"visits"},
    {
        *("plan", "store", "models", "noise", "timesteps", "weighting", "loss", "networks", "optim", "schedule"),
        *("memory", "gradient_noise", "log"),
    },
    {"encode", "estimate", "report", "export", "metadata", "sample", "resize", "preview", "existing", "objective"},
    {"batch", "texts", "preflight", "network_report", "run"},
    {"validate"},
    {"outcome"},
    {"sample_files", "step"},
    {"saving"},
    {"prepare", "result"},
    {"train"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
DATASET_SIDE = {"buckets", "captions", "caption_files", "caption_tables", "images", "masks", "scan", "visits"}
# Of the row that builds on config and rng, only the plan reads the dataset side.
KNOW_NO_DATASET = {
    "store",
    "models",
    "noise",
    "timesteps",
    "weighting",
    "loss",
    "networks",
    "optim",
    "schedule",
    "memory",
    "gradient_noise",
    "log",
}

COMFYUI = {
    "app",
    "comfy",
    "comfy_api",
    "comfy_api_nodes",
    "comfy_execution",
    "comfy_extras",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "nodes",
    "server",
}


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (level, module, name) of every import a file executes, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    typing_only = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", alias.name) for alias in node.names)


def python_files(folder: str) -> list[Path]:
    """Return a folder's Python files."""
    return sorted((ROOT / folder).rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the part of trainer_core that a file belongs to: its module or its sub-package."""
    return path.relative_to(ROOT / "trainer_core").with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    """Return the parts of trainer_core that a file of trainer_core imports."""
    folder = path.relative_to(ROOT).parent.parts
    found = set()
    for level, module, name in imports(path):
        if level:
            target = [*folder[: len(folder) - level + 1], *filter(None, module.split(".")), name]
            assert target[0] == "trainer_core", f"{path.name} reaches outside trainer_core: {'.'.join(target)}"
            found.add(target[1])
    return found


def relative(path: Path) -> str:
    """Name a file in test ids."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", python_files("trainer_core"), ids=relative)
def test_the_core_imports_in_one_direction(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        assert not imported_parts(path), "the core's __init__ imports nothing: importing one part must stay light"
        return
    assert part in ROW_OF, f"{part} has no place in ROWS: say what it may import"
    for other in imported_parts(path) - {part}:
        assert ROW_OF.get(other, len(ROWS)) < ROW_OF[part], f"{relative(path)} may not import {other}"
        knows = part not in KNOW_NO_DATASET
        assert knows or other not in DATASET_SIDE, f"{relative(path)} may not import {other}: only the plan does"


@pytest.mark.parametrize("path", python_files("trainer_core"), ids=relative)
def test_the_core_knows_neither_comfyui_nor_itself_by_name(path: Path) -> None:
    absolute = {module.split(".")[0] for level, module, _ in imports(path) if not level}
    assert not absolute & COMFYUI, "pass what the core needs as an argument"
    assert not absolute & {"trainer_core", "lora_atelier"}, "imports inside the core are relative"


@pytest.mark.parametrize("path", python_files("nodes"), ids=relative)
def test_only_the_bridge_touches_the_comfyui_process(path: Path) -> None:
    absolute = {module.split(".")[0] for level, module, _ in imports(path) if not level}
    # tiny.py describes the embedded tiny base model to ComfyUI in ComfyUI's own classes
    allowed = COMFYUI if path.name in ("bridge.py", "session.py", "progress.py", "tiny.py") else {"comfy_api"}
    assert not (absolute & COMFYUI) - allowed, "go through nodes/bridge.py, session.py or progress.py"


def test_the_node_api_is_imported_in_one_module_of_nodes() -> None:
    users = [
        relative(path)
        for path in python_files("nodes")
        if any(not level and module.startswith("comfy_api") for level, module, _ in imports(path))
    ]
    assert len(users) <= 1, "let the others import `io` and `ui` from that one"
