"""Templates of what stands around a training: captions, masks, an adapter, a LoRA to share."""

from __future__ import annotations

from typing import Any

from .canvas import TINY, File, Graph
from .pictures import BETWEEN, EXAMPLE, ON_TOY


def captioned(graph: Graph, text: File) -> dict[str, Any]:
    """Write the workflow that lets a vision model write a caption beside each picture of a folder."""
    data = graph.add("AtelierConceptDataset", (0, 0), (300, 290), folder="my_pictures")
    clip = graph.add("CLIPLoader", (0, 412), (300, 130), models=[text], **{"0": text.name, "1": "stable_diffusion"})
    asked = graph.add("AtelierCaptionInstruction", (0, 600), (300, 230))
    seen = graph.add("AtelierDatasetPictures", (360, 130), (270, 106), linked={"dataset": (data, "DATASET")})
    said = graph.add(
        "TextGenerate",
        (690, 340),
        (320, 400),
        linked={"clip": (clip, "CLIP"), "image": (seen, "IMAGE"), "prompt": (asked, "STRING")},
    )
    graph.add(
        "AtelierWriteCaptions",
        (1070, 0),
        (340, 106),
        linked={"dataset": (data, "DATASET"), "texts": (said, "generated_text")},
    )
    graph.note(
        (1070, 190),
        (340, 360),
        "**Captions for a folder**\n\n1. **Concept Dataset**: write the *folder* of your pictures.\n2. **Load CLIP**: "
        "choose a vision model, as Qwen3-VL.\n3. **Caption Instruction**: choose what you train, and what captions "
        "call it.\n4. Press **Run**. Each picture gets a text of its name. One that has a text keeps it.\n\nRead a few "
        "before you train. Cancel keeps what is written; the next **Run** goes on there.\n\nA tagger works as well: "
        "link its text into *texts*. **Train LoRA** may follow *DATASET*.",
    )
    return graph.workflow()


def masked(graph: Graph, model: File) -> dict[str, Any]:
    """Write the workflow that lets a model write a mask beside each picture of a folder."""
    data = graph.add("AtelierConceptDataset", (0, 0), (300, 290), folder="my_pictures")
    loaded = graph.add("CheckpointLoaderSimple", (0, 412), (300, 98), models=[model], **{"0": model.name})
    seen = graph.add("AtelierDatasetPictures", (360, 130), (270, 106), linked={"dataset": (data, "DATASET")})
    what = graph.add("CLIPTextEncode", (360, 560), (270, 180), linked={"clip": (loaded, "CLIP")}, **{"0": "person"})
    found = graph.add(
        "SAM3_Detect",
        (690, 340),
        (300, 230),
        linked={"model": (loaded, "MODEL"), "image": (seen, "IMAGE"), "conditioning": (what, "CONDITIONING")},
    )
    graph.add(
        "AtelierWriteMasks",
        (1050, 0),
        (340, 82),
        linked={"dataset": (data, "DATASET"), "masks": (found, "masks")},
    )
    graph.note(
        (1050, 158),
        (340, 332),
        "**Masks for a folder**\n\n1. **Concept Dataset**: write the *folder* of your pictures.\n2. **Load "
        "Checkpoint**: choose SAM 3.\n3. **CLIP Text Encode**: write what is trained, as *person*, *robot* or *chair*."
        "\n4. Press **Run**. Each picture gets a mask, as *cat-masklabel.png*. One that has a mask keeps it.\n\nLook "
        "at a few before you train. Cancel keeps what is written; the next **Run** goes on there.\n\nTo train with "
        "them link *DATASET* into **Mask Loader**, and that into **Train LoRA**.",
    )
    return graph.workflow()


# What the adapter's pictures show: of everything a little, so that it changes nothing but the steps.
SUBJECTS = """portrait photo of an old fisherman, soft window light
a young woman laughing in a park, candid photo
a man in a grey suit walking across a crosswalk
two children building a sandcastle on a beach
a crowded night market in the rain, neon signs
a mountain lake at sunrise, wide angle
a snowy forest path with long shadows
a red vintage car parked in front of a white house
a tabby cat asleep on a stack of books
a horse running through shallow water
a bowl of ramen on a wooden table, top view
a glass of orange juice and a croissant on a tray
a modern living room with large windows
the inside of an old library, warm lamps
a close-up of a dew drop on a leaf
a knight in shining armour, oil painting
a watercolour of a small fishing village
an ink drawing of a bamboo grove
a city of the future at dusk, concept art
a robot watering flowers, children's book illustration
an anime girl with a blue umbrella
a logo of a fox, flat design, white background
a poster with the word OPEN in bold letters
a macro photo of a mechanical watch"""


def adapter(graph: Graph, model: File, text: File, kind: str, vae: File) -> dict[str, Any]:
    """Write the workflow that trains a LoRA on a distilled model's own pictures, to lie beneath others in training."""
    loaded_vae = graph.add("VAELoader", (0, 0), (300, 58), models=[vae], **{"0": vae.name})
    clip = graph.add("CLIPLoader", (0, 130), (300, 130), models=[text], **{"0": text.name, "1": kind})
    unet = graph.add("UNETLoader", (0, 330), (300, 82), models=[model], **{"0": model.name})
    loaded = {"model": (unet, "MODEL"), "clip": (clip, "CLIP"), "vae": (loaded_vae, "VAE")}
    base = graph.add("AtelierConnectModel", (360, -6), (300, 200), linked=loaded, train_distilled=True)
    drawn = graph.add(
        "AtelierDrawnPictures",
        (360, 340),
        (300, 476),
        linked=loaded,
        **{"of": "prompts", "of.prompt": SUBJECTS},
        pictures=20,
        role="train",
    )
    graph.add(
        "AtelierTrain",
        (720, 0),
        (380, 600),
        linked={"base_model": (base, "BASE_MODEL"), "dataset": (drawn, "DATASET")},
        name="training_adapter",
        steps=3000,
    )
    graph.note(
        (0, 460),
        (300, 360),
        "A **training adapter** lets a distilled model (Turbo, Lightning) learn and lose less of its few steps.\n\n1. "
        "Choose the files in the three loaders, and press **Run**. The model draws 480 pictures, and the adapter is "
        "trained on them.\n2. For your own LoRA choose *training_adapter* in **Existing LoRA**: *use* beneath, "
        "*training_only* true. Set *train_distilled* of **Use Connected Model**.\n3. Use your LoRA on the distilled "
        "model without the adapter.",
    )
    graph.note(
        (720, 634),
        (380, 196),
        "**Have you the model that it was distilled from?** Train on that. Or let **Extract LoRA** make the adapter: "
        "that model as the tuned one, the distilled one as the base.\n\nOn a tiny model, training alone undid 59 % of "
        "the distillation. With an adapter of this template it undid 43 %, with an extracted one 17 %.",
    )
    return graph.workflow()


def to_share(graph: Graph) -> dict[str, Any]:
    """Write the workflow that chooses among saves, makes the LoRA smaller and saves it to be shared."""
    base = graph.add("AtelierLoadBaseModel", (0, 0), (300, 358), checkpoint=TINY)
    # As low as this, the view opens with the note above the minimap.
    data = graph.add("AtelierConceptDataset", (0, 540), (300, 290), **EXAMPLE)
    saves = graph.add(
        "AtelierSaves", BETWEEN, (170, 30), collapsed=True, save_every=100, save_unit="steps", keep_last=4
    )
    trained = graph.add(
        "AtelierTrain",
        (360, 150),
        (380, 600),
        linked={
            "base_model": (base, "BASE_MODEL"),
            "dataset": (data, "DATASET"),
            "saves": (saves, "SAVES"),
        },
        name="mossling to share",
        steps=400,
        batch_size=4,
    )
    compared = graph.add(
        "AtelierCompareLoras",
        (800, 0),
        (370, 800),
        linked={
            "model": (base, "MODEL"),
            "clip": (base, "CLIP"),
            "vae": (base, "VAE"),
            "lora_1": (trained, "LORA"),
        },
        **{"of": "saves of lora_1"},
        strengths="0.7, 1",
        prompt="a mossling on a blue background\na mossling on a green background",
        seeds="5",
        **ON_TOY,
    )
    smaller = graph.add(
        "AtelierResizeLora",
        (1230, 0),
        (170, 30),
        collapsed=True,
        linked={"lora": (compared, "LORA")},
        mode="sv_fro",
    )
    graph.add(
        "AtelierSaveLoraFile",
        (1230, 45),
        (320, 260),
        linked={"lora": (smaller, "LORA")},
        file_name="shared/mossling",
        title="Mossling",
        trigger_words="mossling",
        description="A small mossy creature, trained with LoRA Atelier.",
    )
    graph.note(
        (1230, 340),
        (320, 200),
        "Press **Run**: it trains, **compares** its four saves at two strengths, makes the chosen LoRA **smaller** "
        "and **saves** it in *models/loras/shared*.\n\n*choose* of **Compare LoRAs** is its column; 0 is the last "
        "save.\n\nFor a run of yours set *of* to *saves of a run*, without **Train LoRA**.",
    )
    return graph.workflow()
