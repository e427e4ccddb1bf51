"""Templates that train on clips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .canvas import File, Graph, Node


def model_of_clips(graph: Graph, models: list[File], text: File, vae: File, name: str, note: str) -> dict[str, Any]:
    """Write the workflow of a model of clips. models: one file, or those of two experts, for low and for high noise."""
    loaded_vae = graph.add("VAELoader", (0, 0), (300, 58), models=[vae], **{"0": vae.name})
    clip = graph.add("CLIPLoader", (0, 130), (300, 130), models=[text], **{"0": text.name, "1": "wan"})
    unets = [
        graph.add("UNETLoader", (0, 330 + 154 * number), (300, 82), models=[model], **{"0": model.name})
        for number, model in enumerate(models)
    ]
    linked = {"model": (unets[0], "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded_vae, "VAE")}
    if len(unets) > 1:
        linked["model_high"] = (unets[1], "MODEL")
    return with_clips(graph, linked, 330 + 154 * len(unets), name, note)


def ltx2(graph: Graph, checkpoint: File, text: File, name: str, note: str) -> dict[str, Any]:
    """Write the workflow of LTX-2, whose checkpoint holds its VAE, and a part of its text encoder."""
    loaded = graph.add("CheckpointLoaderSimple", (0, 0), (300, 98), models=[checkpoint], **{"0": checkpoint.name})
    named = {"0": text.name, "1": checkpoint.name}
    clip = graph.add("LTXAVTextEncoderLoader", (0, 170), (300, 106), models=[text, checkpoint], **named)
    linked = {"model": (loaded, "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded, "VAE")}
    return with_clips(graph, linked, 348, name, note)


def with_clips(
    graph: Graph, linked: Mapping[str, tuple[Node, str]], below: int, name: str, note: str
) -> dict[str, Any]:
    """Add what trains on clips and draws some. linked: the loaders of the model; below: where there is room under them.

    Samples are drawn by the run, as two experts have no single MODEL to draw with.
    """
    clips = graph.add("AtelierClips", (0, below), (300, 180), take="chunk")
    base = graph.add("AtelierConnectModel", (360, 0), (300, 200), linked=linked)
    # Use Connected Model grows by what it says of the model.
    data = graph.add(
        "AtelierConceptDataset",
        (360, 490),
        (300, 290),
        linked={"clip_settings": (clips, "CLIPS")},
        folder="my_clips",
        trigger_word="mymove",
    )
    drawn = {"sample_prompts": "{caption}", "sample_every": 250, "sample_frames": 33}
    saves = graph.add("AtelierSaves", (450, 445), (170, 30), collapsed=True, **drawn)
    graph.add(
        "AtelierTrain",
        (720, 150),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (data, "DATASET"), "saves": (saves, "SAVES")},
        name="my_move",
        steps=1500,
        resolution=512,
    )
    graph.note(
        (1160, 0),
        (330, 470),
        f"**A motion for {name}**\n\n1. Choose the files in the loaders.\n2. Put 10 to 40 clips of two to five seconds "
        "into *input/my_clips*. Describe in a text file of the same name (*01.mp4*, *01.txt*) what happens. Pictures "
        "may lie beside them.\n3. **Concept Dataset**: *mymove* is the trigger word; write your own.\n4. Press **Run**."
        " Every 250 steps the run draws a clip, which plays on **Train LoRA**.\n\n**Clips** says which frames are "
        "trained. Fewer, or a smaller *resolution*, need less memory. **Saves & Samples**, folded, says what is "
        f"drawn.\n\n{note}",
    )
    return graph.workflow()
