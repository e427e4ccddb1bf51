"""Who may import whom, by the table in docs/design.md, and what the core may not know."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "trainer_core"
MOST_FLOORS = 8

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

# What only Stable Diffusion has: names of its parts, its schedule, tokens of a chunk, pixels of a latent, channels.
STABLE_DIFFUSION = r"unet|text_encoder_2|alphas_cumprod|\b77\b|// 8\b|(?i:channels)\W+4\b|\b4 (latent )?channels"


def floors() -> dict[str, int]:
    """Read the floor of each room from the design."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = re.search(r"^Who may import whom.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert table, "docs/design.md has no table after 'Who may import whom'"
    rows = [line.split() for line in table[1].splitlines()]
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    return {room: int(number) for number, *rooms in rows for room in rooms}


@functools.cache
def imports(path: Path) -> list[tuple[int, str, str]]:
    """List (level, module, name) of every import a file executes, also inside functions."""
    found: list[tuple[int, str, str]] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    typing_only = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += ((node.level, node.module or "", alias.name) for alias in node.names)
    return found


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_files(path: Path) -> set[Path]:
    """Return the files of the core that a file of the core imports."""
    found = set()
    for level, module, name in imports(path):
        if level:
            start = path.parents[level - 1]
            place = start.joinpath(*filter(None, module.split(".")))
            options = (
                place / f"{name}.py",
                place / name / "__init__.py",
                place.with_suffix(".py"),
                place / "__init__.py",
            )
            file = next((option for option in options if option.is_file()), None)
            assert file and file.is_relative_to(CORE), f"{relative(path)} imports {module}.{name} from outside the core"
            found.add(file)
    return found - {path}


def room_of(path: Path) -> str:
    """Return the room of a file of the core: its folder, or its own name where it has none."""
    return path.relative_to(CORE).with_suffix("").parts[0]


def circle(arrows: dict[Path, set[Path]]) -> list[str]:
    """Return a circle of files that import one another; [] where there is none."""
    left = dict(arrows)
    while left:
        done = [path for path, targets in left.items() if not targets & left.keys()]
        if not done:
            path, seen = min(left), []
            while path not in seen:
                seen.append(path)
                path = min(left[path] & left.keys())
            return [relative(each) for each in seen[seen.index(path) :]]
        left = {path: targets for path, targets in left.items() if path not in done}
    return []


def test_the_core_imports_along_the_floors_of_the_design() -> None:
    floor = floors()
    assert max(floor.values()) <= MOST_FLOORS
    arrows = {path: imported_files(path) for path in python_files(CORE)}
    assert not arrows[CORE / "__init__.py"], "the core's __init__ imports nothing: importing one part must stay light"
    rooms = {room_of(path) for path in arrows} - {"__init__"}
    assert rooms == floor.keys(), "the design's table and the rooms differ"
    wrong = [
        f"{relative(path)} imports {relative(other)}"
        for path, others in arrows.items()
        for other in others
        if room_of(path) != room_of(other) and floor[room_of(other)] >= floor[room_of(path)]
    ]
    assert not wrong, "\n".join(wrong)
    assert not circle(arrows), " imports ".join(circle(arrows))


def test_only_the_bridge_of_the_nodes_touches_the_comfyui_process() -> None:
    def named(path: Path) -> set[str]:
        return {module.split(".")[0] for level, module, _ in imports(path) if not level}

    for path in python_files(CORE):
        assert not named(path) & COMFYUI, f"{relative(path)}: pass what the core needs as an argument"
        assert not named(path) & {"trainer_core", "lora_atelier"}, f"{relative(path)}: imports in the core are relative"
    bridge = ROOT / "nodes" / "comfyui"
    for path in python_files(ROOT / "nodes"):
        allowed = COMFYUI if path.is_relative_to(bridge) else {"comfy_api"}
        assert not (named(path) & COMFYUI) - allowed, f"{relative(path)}: go through nodes/comfyui"
    users = [relative(path) for path in python_files(ROOT / "nodes") if "comfy_api" in named(path)]
    assert len(users) == 1, "let the others import `io` and `ui` from that one"


def test_only_stable_diffusions_own_room_knows_a_unet() -> None:
    own = (CORE / "models" / "sd", CORE / "config", CORE / "workflow" / "foreign")  # names of other trainers
    found = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in python_files(CORE)
        if not any(path.is_relative_to(room) for room in own)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(STABLE_DIFFUSION, line)
    ]
    assert not found, "\n".join(found)
