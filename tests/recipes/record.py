"""Record what the recipes give, or say how far another machine or another state of the code is from it.

    python tests/recipes/record.py                     write losses.json anew: only where losses are meant to change
    python tests/recipes/record.py --deviations        print how far each recipe's losses are from losses.json
    python tests/recipes/record.py --digests FILE      write the exact bits of all recipes, before a refactoring
    python tests/recipes/record.py --compare FILE      ... and after it: list the recipes that differ by a bit

Names of recipes may follow, and limit it to these. Bits only agree on one machine with the same libraries and number
of threads; FILE says which. COMFYUI_PATH names the ComfyUI folder whose tokenizer is used, else one is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path[0] = str(Path(__file__).resolve().parents[1])  # tests, where `recipes` is this folder

from recipes.recipes import RECIPES, Material, carry_out  # noqa: E402

from lora_atelier.dev import NEWEST, comfyui_folder  # noqa: E402

LOSSES = Path(__file__).with_name("losses.json")


def losses_of(result: Any) -> dict[str, Any]:
    """Return the losses of a run as JSON holds them, and the step whose weights were kept as the best."""
    found = {"losses": list(result.losses), "validation": [list(pair) for pair in result.validation]}
    return found | ({"best": result.best[0]} if result.best else {})


def deviation(found: dict[str, Any], recorded: dict[str, Any]) -> float:
    """Return how far losses are from recorded ones, relative to these, at the worst place."""
    pairs = list(zip(found["losses"], recorded["losses"], strict=True))
    pairs += [(a[1], b[1]) for a, b in zip(found["validation"], recorded["validation"], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def digests_of(result: Any) -> dict[str, Any]:
    """Return the exact bits of a run: losses in hexadecimal, and a sha256 of each file's tensors."""
    files = {"lora": result.tensors}
    files |= {f"word {word}": load_file(path) for word, path in sorted(result.embeddings.items())}
    files |= {f"other {number}": load_file(path) for number, path in enumerate(result.others)}
    return {
        "losses": [loss.hex() for loss in result.losses],
        "validation": [[step, loss.hex()] for step, loss in result.validation],
        "concepts": {name: [loss.hex() for loss in losses] for name, losses in sorted(result.concepts.items())},
        "best": list(result.best) if result.best else None,
        **{name: digest(tensors) for name, tensors in files.items()},
    }


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a sha256 of tensors by name: dtypes, shapes and bytes."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def conditions() -> dict[str, Any]:
    """Name the machine, libraries and threads that the bits depend on."""
    return {
        "torch": torch.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    """Carry out the recipes and do what the arguments say; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--deviations", action="store_true")
    kind.add_argument("--digests", type=Path, metavar="FILE")
    kind.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="recipe", help=", ".join(RECIPES))
    options = parser.parse_args()
    if unknown := set(options.names) - set(RECIPES):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    names = options.names or list(RECIPES)

    before = json.loads(options.compare.read_text()) if options.compare else {}
    if before and before["conditions"] != conditions():
        print(f"Not comparable: recorded with {before['conditions']}, and this is {conditions()}.")
        return 1
    recorded = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    digests: dict[str, Any] = {}
    worst, differing = 0.0, []
    with tempfile.TemporaryDirectory() as temporary:
        material = Material(Path(temporary) / "material", comfyui_folder(NEWEST) / "comfy" / "sd1_tokenizer")
        for number, name in enumerate(names):
            result = carry_out(name, material, Path(temporary) / f"run{number}")
            digests[name] = json.loads(json.dumps(digests_of(result)))
            if options.deviations:
                found = deviation(losses_of(result), recorded[name])
                worst = max(worst, found)
                print(f"{found:.1e}  {name}", flush=True)
            elif options.compare:
                was = before["recipes"].get(name, {})
                parts = [part for part in {**was, **digests[name]} if was.get(part) != digests[name].get(part)]
                differing += [name] if parts else []
                print(f"{'differs in ' + ', '.join(parts) if parts else 'equal'}: {name}", flush=True)
            else:
                recorded[name] = losses_of(result)
                print(f"{result.losses[0]:.4f} ... {result.losses[-1]:.4f}  {name}", flush=True)
    if options.deviations:
        print(f"{worst:.1e}  worst of all")
        return 0
    if options.compare:
        print(f"{len(differing)} of {len(names)} recipes differ.")
        return 1 if differing else 0
    if options.digests:
        whole = {"conditions": conditions(), "recipes": digests}
        options.digests.write_text(json.dumps(whole, indent=1) + "\n")
        return 0
    LOSSES.write_text(json.dumps({name: recorded[name] for name in RECIPES if name in recorded}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
