"""Templates that train on pictures: node by node, Stable Diffusion, and models that ComfyUI's own loaders load."""

from __future__ import annotations

from typing import Any

from .canvas import TINY, File, Graph, Node

# A collapsed node stands above Concept Dataset, which grows by a sentence where something is wrong.
BETWEEN, BELOW = (90, 416), (0, 480)
BENEATH_SAMPLE = (800, 625), (584, 220)  # a note, beside the minimap
SHARP = {"min_snr_gamma": 5.0}  # as guides recommend, whatever the subject: docs/learning.md
EXAMPLE = {"folder": "atelier:concept_example"}
ON_TOY = {"width": 128, "height": 128, "steps": 20, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal"}
MY = {"folder": "my_pictures", "trigger_word": "mychar"}
PICTURES = (
    "Put 15 to 40 varied pictures into *input/my_pictures*. Say what may vary in each in a text file of the same name "
    "(*01.png*, *01.txt*)."
)
LATER = (
    "*Preset* of **Train LoRA** suits a character, a style or a thing. *Dataset Preview* shows each picture as it is "
    "trained."
)


def of_stable_diffusion(
    graph: Graph,
    checkpoint: File | None,
    concept: dict[str, Any],
    train: dict[str, Any],
    drawn: dict[str, Any],
) -> Node:
    """Add the five nodes of a workflow for Stable Diffusion, which draws before and after; give Train LoRA."""
    base = graph.add(
        "AtelierLoadBaseModel",
        (0, 0),
        (300, 358),
        models=[checkpoint] if checkpoint else [],
        checkpoint=checkpoint.name if checkpoint else TINY,
    )
    data = graph.add("AtelierConceptDataset", (0, 424), (300, 290), **concept)
    # The links from the base to Sample pass above Train LoRA, which stands lower for that.
    trained = graph.add(
        "AtelierTrain",
        (360, 150),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (data, "DATASET")},
        **train,
    )
    sample = graph.add(
        "AtelierSample",
        (800, 0),
        (330, 570),
        linked={
            "model": (trained, "MODEL"),
            "clip": (trained, "CLIP"),
            "vae": (base, "VAE"),
            "before_model": (base, "MODEL"),
            "before_clip": (base, "CLIP"),
        },
        **drawn,
    )
    # Below what the editor tells at the upper right, above its minimap.
    graph.add(
        "SaveImage", (1190, 195), (330, 355), linked={"images": (sample, "IMAGE")}, **{"0": f"atelier/{train['name']}"}
    )
    return trained


def node_by_node(graph: Graph) -> dict[str, Any]:
    """Write the quickstart: each step is a node of its own."""
    trained = of_stable_diffusion(
        graph,
        None,
        EXAMPLE,
        {"name": "mossling", "steps": 600, "batch_size": 4},
        {"prompt": "a mossling on a blue background", "batch_size": 4, "seed": 5, **ON_TOY},
    )
    graph.note(
        *BENEATH_SAMPLE,
        "Press **Run**. A toy model learns a *mossling* (left: before, right: after).\n\n"
        "**Your own pictures:** put 10 to 30 into *input/my_pictures*, each with a text file of the "
        "same name that describes it.\n\n1. **Concept Dataset**: *folder* my_pictures, a made-up *trigger_word*.\n2. "
        "**Load Base Model**: your checkpoint.\n3. **Train LoRA**: a *name*, 1000 *steps*, *batch_size* 1.\n4. "
        "**Sample**: no *prompt*, *width* and *height* 0 draw what was trained.\n\nFlux, Z-Image, Qwen-Image and "
        "others have their own templates.",
    )
    _, data, *_ = graph.nodes
    data.at = BELOW
    weighed = graph.add("AtelierObjective", BETWEEN, (170, 30), collapsed=True, **SHARP)
    trained.inputs = {**trained.inputs, "objective": (weighed, "OBJECTIVE")}
    return graph.workflow()


def stable_diffusion(graph: Graph, checkpoint: File, size: int, note: str) -> dict[str, Any]:
    """Write the workflow of a kind of Stable Diffusion. size: the least side of good pictures, in pixels."""
    of_stable_diffusion(graph, checkpoint, MY, {"name": "my_character", "steps": 1500}, {})
    graph.note(
        *BENEATH_SAMPLE,
        f"1. **Load Base Model**: choose the checkpoint that you will draw with.\n2. {PICTURES} At least {size} "
        f"pixels.\n3. **Concept Dataset**: write your own trigger word.\n4. Press **Run**.\n\n{LATER} {note}",
    )
    return graph.workflow()


def linked_model(graph: Graph, model: File, texts: list[File], kind: str, vae: File, note: str) -> dict[str, Any]:
    """Write the workflow of a model that ComfyUI's own loaders load. kind: `type` of the loader of text encoders."""
    loaded_vae = graph.add("VAELoader", (0, 0), (300, 58), models=[vae], **{"0": vae.name})
    loader = "DualCLIPLoader" if len(texts) > 1 else "CLIPLoader"
    named = {str(i): value for i, value in enumerate([*(file.name for file in texts), kind])}
    clip = graph.add(loader, (0, 130), (300, 130), models=texts, **named)
    unet = graph.add("UNETLoader", (0, 330), (300, 82), models=[model], **{"0": model.name})
    base = graph.add(
        "AtelierConnectModel",
        (340, 96),
        (300, 200),
        linked={"model": (unet, "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded_vae, "VAE")},
    )
    data = graph.add("AtelierConceptDataset", (340, 440), (300, 290), **MY)
    trained = graph.add(
        "AtelierTrain",
        (680, 150),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (data, "DATASET")},
        name="my_character",
        steps=1500,
    )
    sample = graph.add(
        "AtelierSample",
        (1100, 0),
        (330, 520),
        linked={"model": (trained, "MODEL"), "clip": (trained, "CLIP"), "vae": (loaded_vae, "VAE")},
    )
    graph.add(
        "SaveImage", (1100, 616), (240, 229), linked={"images": (sample, "IMAGE")}, **{"0": "atelier/my_character"}
    )
    graph.note(
        (0, 452),
        (300, 393),
        f"1. Choose the files in the three loaders.\n2. {PICTURES}\n3. **Concept Dataset**: write your own trigger "
        f"word.\n4. Press **Run**.\n\n{LATER}\n\n{note}",
    )
    return graph.workflow()
