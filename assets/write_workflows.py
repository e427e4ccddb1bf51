"""Write the workflows that come with the pack, workflows/*.json, and the blueprint in subgraphs/.

python assets/write_workflows.py [FOLDER]

This page lists them, with the files of models that each names. In templates/ a workflow is one function: its nodes,
what links them, and where they stand. A template opens fitted into three quarters of the window, so each stays small:
then it opens at 0.6 or more of its size, where words are read. The editor's minimap lies over the lower right of the
window, so nothing of a template stands there.
Values that are not given are the defaults of the nodes. The shipped files are what this script writes; a test compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from templates.around import adapter, captioned, masked, to_share
from templates.blueprint import BLUEPRINT, shipped_blueprint, start, start_as_app
from templates.canvas import File, Graph
from templates.clips import ltx2, model_of_clips
from templates.pictures import linked_model, node_by_node, stable_diffusion

ROOT = Path(__file__).parent.parent

COMFY = "Comfy-Org"
SPLIT = "resolve/main/split_files"
AE = File("ae.safetensors", "vae", f"{COMFY}/z_image_turbo/{SPLIT}/vae")
ENCODERS = "comfyanonymous/flux_text_encoders/resolve/main"
WAN = f"{COMFY}/Wan_2.2_ComfyUI_Repackaged/{SPLIT}"
UMT5 = File(
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    "text_encoders",
    f"{COMFY}/Wan_2.1_ComfyUI_repackaged/{SPLIT}/text_encoders",
)
QWEN = f"{COMFY}/Qwen-Image_ComfyUI/{SPLIT}"

WORKFLOWS: dict[str, Callable[[Graph], dict[str, Any]]] = {
    "workflows/1 Start here": start,
    "workflows/1 Start here.app": start_as_app,
    "workflows/2 Train a LoRA node by node": node_by_node,
    "workflows/3 Stable Diffusion 1.5": lambda graph: stable_diffusion(
        graph,
        File(
            "v1-5-pruned-emaonly-fp16.safetensors",
            "checkpoints",
            f"{COMFY}/stable-diffusion-v1-5-archive/resolve/main",
        ),
        512,
        "6 GB of GPU memory are enough.",
    ),
    "workflows/4 Stable Diffusion XL": lambda graph: stable_diffusion(
        graph,
        File(
            "sd_xl_base_1.0.safetensors",
            "checkpoints",
            "stabilityai/stable-diffusion-xl-base-1.0/resolve/main",
        ),
        1024,
        "Pony, Illustrious and NoobAI are XL, too.",
    ),
    "workflows/5 Z-Image": lambda graph: linked_model(
        graph,
        File("z_image_bf16.safetensors", "diffusion_models", f"{COMFY}/z_image/{SPLIT}/diffusion_models"),
        [File("qwen_3_4b.safetensors", "text_encoders", f"{COMFY}/z_image_turbo/{SPLIT}/text_encoders")],
        "lumina2",
        AE,
        "Not Turbo: the LoRA works on Turbo afterwards.",
    ),
    "workflows/6 FLUX.1 dev": lambda graph: linked_model(
        graph,
        File("flux1-dev.safetensors", "diffusion_models", f"{COMFY}/flux1-dev/resolve/main"),
        [
            File("clip_l.safetensors", "text_encoders", ENCODERS),
            File("t5xxl_fp16.safetensors", "text_encoders", ENCODERS),
        ],
        "flux",
        AE,
        "Little memory? Set *weight_dtype* of **Load Diffusion Model** to fp8_e4m3fn.",
    ),
    "workflows/7 Qwen-Image": lambda graph: linked_model(
        graph,
        File("qwen_image_fp8_e4m3fn.safetensors", "diffusion_models", f"{QWEN}/diffusion_models"),
        [File("qwen_2.5_vl_7b_fp8_scaled.safetensors", "text_encoders", f"{QWEN}/text_encoders")],
        "qwen_image",
        File("qwen_image_vae.safetensors", "vae", f"{QWEN}/vae"),
        "The weights are float8 here, the LoRA is not.",
    ),
    "workflows/8 Compare, shrink, share": to_share,
    "workflows/9 Make a training adapter": lambda graph: adapter(
        graph,
        File("z_image_turbo_bf16.safetensors", "diffusion_models", f"{COMFY}/z_image_turbo/{SPLIT}/diffusion_models"),
        File("qwen_3_4b.safetensors", "text_encoders", f"{COMFY}/z_image_turbo/{SPLIT}/text_encoders"),
        "lumina2",
        AE,
    ),
    "workflows/10 Caption a folder": lambda graph: captioned(
        graph,
        File("qwen3vl_8b_fp8_scaled.safetensors", "text_encoders", f"{COMFY}/Qwen3-VL/resolve/main/text_encoders"),
    ),
    "workflows/11 Mask a folder": lambda graph: masked(
        graph, File("sam3.1_multiplex_fp16.safetensors", "checkpoints", f"{COMFY}/sam3.1/resolve/main/checkpoints")
    ),
    "workflows/12 Wan 2.2 5B": lambda graph: model_of_clips(
        graph,
        [File("wan2.2_ti2v_5B_fp16.safetensors", "diffusion_models", f"{WAN}/diffusion_models")],
        UMT5,
        File("wan2.2_vae.safetensors", "vae", f"{WAN}/vae"),
        "Wan 2.2 5B",
        "It also draws from a picture: *first_frame* of **Clips** 0.5 trains both ways.",
    ),
    "workflows/13 Wan 2.2 14B": lambda graph: model_of_clips(
        graph,
        [
            File(f"wan2.2_t2v_{half}_noise_14B_fp8_scaled.safetensors", "diffusion_models", f"{WAN}/diffusion_models")
            for half in ("low", "high")
        ],
        UMT5,
        File("wan_2.1_vae.safetensors", "vae", f"{WAN}/vae"),
        "both experts of Wan 2.2 14B",
        "Each step trains one expert, whose noise it draws; the other waits. Each gets a file, *-low* and *-high*.",
    ),
    "workflows/14 LTX-2": lambda graph: ltx2(
        graph,
        File("ltx-2-19b-dev-fp8.safetensors", "checkpoints", "Lightricks/LTX-2/resolve/main"),
        File("gemma_3_12B_it_fp4_mixed.safetensors", "text_encoders", f"{COMFY}/ltx-2/{SPLIT}/text_encoders"),
        "LTX-2",
        "Sound is not trained. It also draws from a picture: *first_frame* of **Clips** 0.5 trains both ways.",
    ),
    f"subgraphs/{BLUEPRINT}": shipped_blueprint,
}


def forms() -> dict[str, dict[str, Any]]:
    """Return inputs and outputs of this pack's nodes, as its tests keep them."""
    from lora_atelier.trainer_core.workflow.canvas import form_of

    info = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))
    return {
        name: {
            "rows": form_of(name, each["input"], each.get("input_order")).inputs,
            "types": {
                input_: "COMBO" if isinstance(spec[0], list) else spec[0]
                for group in ("required", "optional")
                for input_, spec in each["input"].get(group, {}).items()
            },
            "outputs": dict(zip(each["output_name"], each["output"], strict=True)),
        }
        for name, each in info.items()
    }


def write(folder: Path) -> None:
    """Write all files into a folder that is laid out as the repository."""
    known = forms()
    for name, build in WORKFLOWS.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(build(Graph(known)), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))  # for lora_atelier, under which name tests import the pack
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
