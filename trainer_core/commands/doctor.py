"""doctor: what is wrong with an installation, in half a minute, in lines that hold no path of the machine."""

from __future__ import annotations

import argparse
import functools
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..common.command_line import PROGRAM, comfyui_around
from ..common.wording import without_paths
from ..workflow.places import ASSETS, TOKENIZER

PACK = ASSETS.parent
STEPS, SIDE = 2, 128  # of the run that is tried
LEAST_FREE = 5e9  # bytes; a run of Stable Diffusion XL with a few saves takes about as much
Line = tuple[bool, str]  # whether all is well, and what was found


def main(arguments: Sequence[str]) -> int:
    """Look at an installation and print a line for each thing; return 1 where one is wrong."""
    text = "Look for what is wrong with this installation, and train two steps on the tiny base."
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} doctor", description=text)
    parser.add_argument("--comfyui", type=Path, help="ComfyUI's folder, where the pack does not lie in it")
    options = parser.parse_args(arguments)
    base = comfyui_around()  # ComfyUI Desktop, and --base-directory, keep it elsewhere than ComfyUI
    comfyui = options.comfyui.absolute() if options.comfyui else base
    folders = comfyui if base is None else base
    wrong = 0
    for look in (pythons, packages, optional, devices, lambda: places(comfyui, folders), lambda: two_steps(comfyui)):
        for well, found in _looked(look):
            wrong += not well
            print(f"{'ok   ' if well else 'WRONG'}  {nameless(found, comfyui, folders)}", flush=True)
    last = {0: "Nothing is wrong.", 1: "One thing is wrong."}.get(wrong, f"{wrong} things are wrong.")
    print(f"{last} Add these lines to an issue; they hold no name and no path of this machine.")
    return int(wrong > 0)


def _looked(look: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    try:
        yield from look()
    except (ImportError, OSError) as problem:  # a package of another Python, or whose library is missing
        yield False, f"what is installed cannot be used: {problem}"


def pythons() -> Iterator[Line]:
    """Look at the pack, Python and the system."""
    yield True, f"LoRA Atelier {_written('version')}"
    yield sys.version_info >= (3, 10), f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def packages() -> Iterator[Line]:
    """Look at the packages that every run needs."""
    if _version("torch"):
        yield _package("torch", "2")
    else:
        yield False, "torch is not installed for this Python; run doctor by the Python that starts ComfyUI"
    yield from (_package(name, least) for name, least in required("dependencies"))


def optional() -> Iterator[Line]:
    """List the packages that some settings need; none of them has to be there."""
    names = [name for group in lists() if group not in ("dependencies", "dev") for name, _ in required(group)]
    yield True, "for some settings: " + ", ".join(f"{name} {_version(name) or 'is not installed'}" for name in names)


def required(group: str) -> list[tuple[str, str]]:
    """Give (package, least version) of a list of pyproject.toml."""
    return re.findall(r'"([\w-]+)>=([\w.]+)', lists().get(group, ""))


def lists() -> dict[str, str]:
    """Read the lists of packages in pyproject.toml, which stays the one place that has them."""
    listed = _project().partition("[project.urls]")[0]
    return dict(re.findall(r"^(\w+) = \[(.*?)\]$", listed, re.DOTALL | re.MULTILINE))


def _project() -> str:
    return (PACK / "pyproject.toml").read_text(encoding="utf-8")


def _written(name: str) -> str:
    """Read a version that pyproject.toml gives; "" if it has none of that name."""
    found = re.search(rf'^{name} = "[>=]*([^"]*)"', _project(), re.MULTILINE)
    return found[1] if found else ""


def devices() -> Iterator[Line]:
    """Look at the device of runs and its memory."""
    import torch

    from ..common.devices import fastest, kind_of, module_of
    from ..memory import choose_dtype, free_bytes

    device = fastest()
    module = module_of(device)
    name = f" ({module.get_device_name(device)})" if hasattr(module, "get_device_name") else ""
    where = "RAM" if kind_of(device).shares_ram else "its memory"
    computes = str(choose_dtype("auto", device)).removeprefix("torch.")
    free = f"{free_bytes(device) / 1e9:.1f} GB of {where} free"
    yield True, f"torch {torch.__version__} on {device.type}{name}: {free}, computes in {computes}"


def places(comfyui: Path | None, base: Path | None) -> Iterator[Line]:
    """Look at ComfyUI, and at the folders in its base: whether they can be written, and have room."""
    from ..common.files import check_writable

    if comfyui is None or base is None or not (comfyui / "comfy").is_dir():
        yield False, "ComfyUI is not around the pack; name its folder: doctor --comfyui FOLDER"
        return
    text = (comfyui / "comfyui_version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]*)"', text)
    version, least = found[1] if found else "", _written("requires-comfyui")
    older = f"ComfyUI {version} is older than {least}; update ComfyUI"
    known = not version or _numbers(version) >= _numbers(least)
    yield known, f"ComfyUI {version or 'of an unknown version'}" if known else older
    for name in ("output", "models/loras", "user"):
        try:
            check_writable(base / name)
        except ValueError as problem:
            yield False, f"{name}: {problem}"
            continue
        free = shutil.disk_usage(base / name).free
        enough = free > LEAST_FREE
        remedy = "" if enough else f"; a run may take {LEAST_FREE / 1e9:.0f} GB, so delete what you do not need"
        yield enough, f"{name} can be written, {free / 1e9:.0f} GB free{remedy}"


def two_steps(comfyui: Path | None) -> Iterator[Line]:
    """Train two steps on the tiny base, and write the LoRA."""
    if comfyui is None or not (comfyui / TOKENIZER).is_dir():
        yield False, "no step was tried, as it needs ComfyUI's tokenizer"
        return
    from ..common.devices import fastest

    seconds: list[float] = []
    device = fastest()
    with tempfile.TemporaryDirectory(prefix="atelier-doctor-") as folder:
        try:
            size = _train(Path(folder), comfyui, seconds.append)
        except (ValueError, RuntimeError, OSError) as problem:
            reason = str(problem).replace(folder, "the temporary folder")
            yield False, f"{STEPS} steps on {device.type} failed: {reason}"
            return
    yield True, f"{STEPS} steps on {device.type}: {min(seconds):.2f} s a step, a LoRA of {size / 1e6:.1f} MB"


def _train(folder: Path, comfyui: Path, took: Callable[[float], None]) -> int:
    """Train in a folder; return the bytes of the LoRA. took: called with the seconds of each step."""
    from ..common.callbacks import Callbacks
    from ..common.devices import fastest
    from ..config import BaseModelConfig, ConceptConfig, DatasetConfig, RunConfig, TrainConfig
    from ..train import train_lora

    base = BaseModelConfig(path=str(ASSETS / "atelier-tiny.safetensors"), tokenizer=str(comfyui / TOKENIZER))
    concept = ConceptConfig(folder=str(ASSETS / "concept_example"))
    config = RunConfig(
        base_model=base,
        dataset=DatasetConfig(concepts=(concept,)),
        train=TrainConfig(steps=STEPS, batch_size=2, resolution=SIDE),
    )
    told = Callbacks(step=lambda report: took(report.seconds))
    result = train_lora(config, folder / "lora.safetensors", folder / "cache", device=fastest(), callbacks=told)
    return result.path.stat().st_size if result else 0


def _package(name: str, least: str) -> Line:
    found, wanted = _version(name), f'install "{name}>={least}" with ComfyUI\'s Python'
    if not found:
        return False, f"{name} is not installed; {wanted}"
    if _numbers(found) < _numbers(least):
        return False, f"{name} {found} is older than {least}; {wanted}"
    return True, f"{name} {found}"


def _version(name: str) -> str:
    return _installed().get(name.replace("-", "_"), "")


@functools.cache
def _installed() -> dict[str, str]:
    """Read the version of each package from the name of the folder in which its installer keeps what it did."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for each in Path(folder).glob("*-*.dist-info"):
            name, _, number = each.name.removesuffix(".dist-info").rpartition("-")
            found.setdefault(re.sub(r"[-_.]+", "_", name).lower(), number)
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))[:3]


def nameless(text: str, comfyui: Path | None, base: Path | None) -> str:
    """Leave out of a sentence the folders that would tell about a machine and its person."""
    named = {str(PACK): "the pack", str(comfyui): "ComfyUI", str(base): "ComfyUI", str(Path.home()): "~"}
    for path, name in named.items():
        if len(path) > 1 and path != "None":
            text = text.replace(path, name)
    return " ".join(without_paths(text).split())
