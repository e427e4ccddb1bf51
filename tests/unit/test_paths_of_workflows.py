"""Where the nodes touch the disk: paths that a workflow names go through nodes/comfyui/folders.py alone."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUARDS = ("comfyui/folders.py", "comfyui/allowed.py", "comfyui/kept.py")  # they decide what may be read and written
SAFE = {  # modules of nodes/ and functions in them that touch the disk -> why no workflow decides where
    ("comfyui/connected/identity.py", "files_of"): "files that ComfyUI's own loaders have read; they are hashed",
    ("comfyui/connected/identity.py", "stamp_of_files"): "size and time of these files",
    ("comfyui/models.py", "load_models"): "the checkpoint and files that folders.py found in ComfyUI's lists",
    ("comfyui/models.py", "_load_clip"): "the same files",
    ("comfyui/models.py", "_check_folder"): "the same folder, and fixed names in it",
    ("comfyui/models.py", "_weights"): "the same folder, and fixed names in it",
    ("comfyui/models.py", "check_loads"): "the LoRA that Save LoRA File has just written",
    ("comfyui/models.py", "check_lora"): "the LoRA that the run has just written",
    ("comfyui/comparing.py", "read_kept"): "the pack's own folders, and names made of the content's digest",
    ("comfyui/comparing.py", "draw_cells"): "the same folder",
    ("comfyui/drawn.py", "draw_set"): "the pack's own folder, and names made of the content's digest",
    ("comfyui/offline.py", "_tensors"): "the model that a person names in a shell",
    ("help_pages.py", ""): "the pack's own translations",
    ("help_pages.py", "_read"): "the same, by the name of one of them",
    ("help_pages.py", "help_page"): "the pack's own pages, by the names of its nodes and translations",
    ("comfyui/pending.py", "_take"): "a file of this process in ComfyUI's folder of system users",
    ("comfyui/pending.py", "_write"): "the same folder, and names made of numbers",
    ("comfyui/pending.py", "_hold_lock"): "the same folder",
    ("comfyui/pending.py", "_left"): "the same folder, and its listed names",
    ("comfyui/progress.py", "__exit__"): "the folder that the run made",
    ("comfyui/shell.py", ""): "the pack's own folder",
    ("comfyui/shell.py", "_check_linked"): "a fixed name in ComfyUI's folder",
    ("comfyui/shell.py", "_differing"): "paths that folders.py found; they are only compared",
    ("comfyui/shell.py", "_program"): "a program of ComfyUI's own Python",
    ("comfyui/shell.py", "_saved"): "a folder of system users, and a plain name with the content's digest",
    ("comfyui/shell.py", "command_of"): "ComfyUI's own folders",
    ("comfyui/shown.py", "_newest_workflows"): "files of runs, which are listed, no links",
    ("comfyui/shown.py", "remember"): "one file in ComfyUI's folder of system users",
    ("existing.py", "keep"): "the pack's own folder, and a name made of the content's digest",
    ("images.py", "save_pictures"): "the pack's own folder, and names made of numbers and the content's digest",
    ("importing.py", "_bring"): "a folder of this question, which goes with the answer, and plain names in it",
    ("outward_routes.py", "is_installed"): "folders of Python's own path, and the name of a package that we know",
    ("run_routes.py", "_kept"): "files that a run itself has copied, compared with ComfyUI's own folders",
    ("run_routes.py", "answer_export"): "a nameless file in ComfyUI's folder of temporary files",
    ("run_routes.py", "drawn_small"): "a sample of a run, found by its listed name, no link",
    ("run_routes.py", "register_run_routes"): "no path: a function of this name",
    ("run_routes.py", "rename"): "the title inside a run's folder, which is found by its listed name",
    ("run_routes.py", "thumbnail"): "the same sample",
    ("train.py", "output_models"): "the checkpoint that folders.py found in ComfyUI's list",
}
MODULES = ("os", "shutil", "tempfile", "glob", "fileinput", "subprocess", "zipfile", "tarfile", "sqlite3")
PLAIN = ("os.name", "os.sep")  # no calls
TOUCHING = re.compile(
    "absolute|chmod|exists|expanduser|glob|hardlink_to|is_dir|is_file|is_mount|is_symlink|iterdir|lstat|mkdir|open|read_bytes|read_text|readlink|rename|resolve|rglob|rmdir|samefile|stat|symlink_to|touch|unlink|walk|write_bytes|write_text|fromfile|load_checkpoint_guess_config|load_diffusers|load_file|load_torch_file|safe_open"
)


def touched(tree: ast.Module) -> set[tuple[str, str]]:
    """Find (function, name) of every use of a name that touches the disk; function: "" at a module's top."""
    found = set()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if TOUCHING.fullmatch(node.attr) or (whole.split(".")[0] in MODULES and whole not in PLAIN):
                found.add((function, whole))
        elif isinstance(node, ast.Name) and TOUCHING.fullmatch(node.id):
            found.add((function, node.id))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.update((function, each.name) for each in node.names if each.name not in ("BytesIO", "StringIO"))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def test_only_the_guards_touch_paths_of_workflows() -> None:
    used: dict[tuple[str, str], set[str]] = {}
    for path in sorted((ROOT / "nodes").rglob("*.py")):
        module = path.relative_to(ROOT / "nodes").as_posix()
        if module not in GUARDS:
            for function, name in touched(ast.parse(path.read_text(encoding="utf-8"))):
                used.setdefault((module, function), set()).add(name)
    unsafe = {place: names for place, names in used.items() if place not in SAFE}
    assert not unsafe, f"these touch the disk outside {', '.join(GUARDS)}: {unsafe}"
    assert not SAFE.keys() - used.keys(), f"these no longer touch the disk: {SAFE.keys() - used.keys()}"


def test_every_way_to_touch_a_path_is_found() -> None:
    source = (
        "import os\nfrom os import scandir\n"
        "def f(p): open(p); p.stat(); list(map(Path.exists, [p])); os.path.isdir(p); os.name; p.name; Image.open(p)"
    )
    found = {name for _, name in touched(ast.parse(source))}
    assert found == {"scandir", "open", "p.stat", "Path.exists", "os.path.isdir", "os.path", "Image.open"}
