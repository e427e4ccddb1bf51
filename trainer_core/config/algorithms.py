"""The table of algorithms: what each is, and which settings act with it. Plain data.

The class of its layers, with its formulas and its names in files, is a module of networks/layers/, in the list there.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Algorithm(NamedTuple):
    """One algorithm: what it is for people, and what of LoRA Config has a meaning for it."""

    title: str  # in messages
    words: str  # a part of a sentence for the user
    settings: tuple[str, ...] = ()  # those that act with it, beside those of every algorithm
    bare: bool = False  # its node shows none of these, since it rarely needs them
    rank: bool = True  # its layers have a rank that is set
    alpha: bool = True  # they have an alpha
    usual_rank: bool = False  # the rank of the model's family is a good start
    opposite: bool = False  # at strength -1 it does the opposite
    layers: str = ""  # its own choice of layers, as a model lists it beside the presets; "" = the preset's
    sign: str = ""  # a part of its tensors' names that no base model has
    lycoris: str = ""  # its name in LyCORIS; "" = it has none, and metadata calls the file a LoRA
    lycoris_args: tuple[str, ...] = ()  # settings of its own that LyCORIS knows by the same names


KEYS_AND_ENDS = "keys-and-ends"  # keys, values, and the last layer of each MLP
PRODUCT = (
    "dora",
    "tucker",
    "rs_lora",
    "rank_dropout",
    "rank_dropout_scale",
    "use_scalar",
    "scale_weight_norms",
    "bake",
)  # settings of trained factors, whose product is the change
ROTATION = "rotations, which keep the model's character"

ALGORITHMS: dict[str, Algorithm] = {
    "lora": Algorithm(
        "LoRA",
        "two thin factors, right for most",
        (*PRODUCT, "init", "dropout", "timestep_rank", "channel_scaling"),
        usual_rank=True,
        opposite=True,
        lycoris="locon",
    ),
    "loha": Algorithm(
        "LoHa",
        "two products, more expressive for its size",
        PRODUCT,
        usual_rank=True,
        opposite=True,
        sign="hada_w1",
        lycoris="loha",
    ),
    "lokr": Algorithm(
        "LoKr",
        "a Kronecker product, the smallest files",
        (*PRODUCT, "factor", "decompose_both", "full_matrix"),
        opposite=True,
        sign="lokr_w",
        lycoris="lokr",
        lycoris_args=("factor", "decompose_both", "full_matrix"),
    ),
    "glora": Algorithm(
        "GLoRA",
        "also changes the inputs of layers",
        ("rs_lora", "use_scalar"),
        bare=True,
        usual_rank=True,
        lycoris="glora",
    ),
    "ia3": Algorithm(
        "(IA)^3",
        "one number per channel of keys, values and MLP",
        ("bake",),
        rank=False,
        layers=KEYS_AND_ENDS,
        lycoris="ia3",
    ),
    "oft": Algorithm(
        "OFT",
        ROTATION,
        ("constraint", "bake"),
        alpha=False,
        sign="oft_blocks",
        lycoris="oft",
        lycoris_args=("constraint",),
    ),
    "boft": Algorithm(
        "BOFT", ROTATION, ("constraint", "bake"), alpha=False, lycoris="boft", lycoris_args=("constraint",)
    ),
    "full": Algorithm(
        "full difference",
        "the whole difference of each weight, very large",
        rank=False,
        opposite=True,
        lycoris="full",
    ),
}

ELSEWHERE = {  # what other trainers have under these names -> what to take here
    "dylora": "choose lora with the highest rank, and lower it with Resize LoRA",
    "alignprop": "choose lora, and train on the pictures that the reward rates highest",
}


def instead_of(name: str) -> str:
    """Say what to take instead of what other trainers have under a name, however it is written; "" for others."""
    return ELSEWHERE.get(re.sub(r"[\W_]", "", f"{name:.20}").lower(), "")


def with_setting(setting: str) -> tuple[str, ...]:
    """List the algorithms with which a setting acts."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if setting in algorithm.settings)
