"""Inputs of Noise & Loss that give the loss another target: preservation and slider; and its inputs of numbers."""

from __future__ import annotations

from .sockets import io


def number_input(
    name: str, default: float, low: float, high: float, step: float, tooltip: str, optional: bool = False
) -> io.Float.Input:
    """Build the input of a number."""
    return io.Float.Input(
        name,
        default=default,
        min=low,
        max=high,
        step=step,
        round=1e-4,
        optional=optional,
        tooltip=tooltip,
        advanced=optional or None,
    )


def preservation_input() -> io.Input:
    """Build the choice of what the LoRA keeps of the base model."""
    return io.DynamicCombo.Input(
        "preservation",
        options=[
            io.DynamicCombo.Option("off", []),
            io.DynamicCombo.Option("blank", [_preservation_weight()]),
            io.DynamicCombo.Option(
                "class",
                [
                    _preservation_weight(),
                    io.String.Input(
                        "preservation_trigger",
                        default="",
                        tooltip="The word in your captions that names the subject.",
                    ),
                    io.String.Input(
                        "preservation_class",
                        default="",
                        tooltip="What stands in its place: the kind of subject, such as a person.",
                    ),
                ],
            ),
        ],
        optional=True,
        tooltip="Keeps what the base model draws for other captions, so that the subject does not spread. "
        "off (default). blank: without a caption. class: with the subject's class in place of the trigger "
        "word (differential output preservation). Steps take more than twice as long.",
        extra_dict={"advanced": True},
    )


def _preservation_weight() -> io.Float.Input:
    """Build the input of the weight of a preservation."""
    text = "Its loss is multiplied by this; 1 is usual. Higher keeps more and learns more slowly."
    return number_input("preservation_weight", 1.0, 0.0001, 1000.0, 0.1, text)


def slider_input() -> io.Input:
    """Build the choice of a slider."""
    return io.DynamicCombo.Input(
        "slider",
        options=[
            io.DynamicCombo.Option("off", []),
            io.DynamicCombo.Option(
                "prompts",
                [
                    io.String.Input(
                        "slider_positive",
                        default="",
                        placeholder="a very old person",
                        tooltip="More of this at strength 1, for example a very old person.",
                    ),
                    io.String.Input(
                        "slider_negative",
                        default="",
                        placeholder="a very young person",
                        tooltip="More of this at strength -1, for example a very young person.",
                    ),
                    io.String.Input(
                        "slider_keep",
                        default="",
                        placeholder="man, woman",
                        tooltip="What should not change with it, separated by commas: each is added to "
                        "both prompts in turn. Empty = nothing.",
                    ),
                    number_input(
                        "slider_strength",
                        1.0,
                        0.001,
                        100.0,
                        0.5,
                        "How far strength 1 goes, as a multiple of the difference between both prompts; 1 "
                        "to 4 is usual.",
                    ),
                ],
            ),
        ],
        optional=True,
        tooltip="Trains a slider: a LoRA that draws more of one thing at strength 1 and more of its "
        "opposite at -1. off (default). prompts: two prompts say which; of the pictures only noise and "
        "captions count, so that those of Drawn Pictures will do. Steps take about twice as long.",
        extra_dict={"advanced": True},
    )
