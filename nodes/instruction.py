"""Caption Instruction: what a vision model is asked to say of each picture, by what is trained."""

from __future__ import annotations

from .node import Node
from .sockets import CATEGORY, io, titled

ASKED = "Describe this picture in two or three plain sentences, as a caption for training an image model."
INSTRUCTIONS = {  # what is trained -> how it is called where nothing is set, and what is asked
    "character": (
        "the character",
        f"{ASKED} Call the subject {{name}}. Say what differs from picture to picture: pose, expression, clothes, what "
        "is held, surroundings, light and framing. Do not describe what stays the same: face, hair, eyes, skin, build.",
    ),
    "style": (
        "",
        f"{ASKED} Say what is shown: subjects, what they do, place and time of day. Say nothing of how it is made: "
        "no style, medium, technique, colours, mood or artist.",
    ),
    "thing": (
        "the object",
        f"{ASKED} Call the subject {{name}}. Say where it is, how it stands or is held, the angle, the light, and what "
        "else is there. Do not describe what stays the same: its shape, parts, colours, material and writing.",
    ),
    "edit pair": (
        "",
        "The left half shows a picture before an edit, the right half after it. Write the instruction that makes the "
        "right one of the left one, as one sentence that begins with a verb. Name only what changes.",
    ),
}
ALONE = "Answer with that text alone: no heading, no list, no guesses."


class AtelierCaptionInstruction(Node):
    """Write what a vision model is asked."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierCaptionInstruction",
            display_name=titled("Caption Instruction"),
            category=CATEGORY,
            description="What a vision model is asked to say of each picture. A caption names what changes between "
            "pictures; what it leaves out becomes part of what is trained.",
            search_aliases=["caption prompt", "auto caption", "captioning", "vision", "train lora", "atelier"],
            inputs=[
                io.Combo.Input(
                    "of",
                    options=list(INSTRUCTIONS),
                    default="character",
                    tooltip="What is trained. character, thing: what changes is named, not what stays. style: what is "
                    "shown, not how. edit pair: what the edit does; set show of Dataset Pictures to before and after.",
                ),
                io.String.Input(
                    "name",
                    default="",
                    placeholder="the character",
                    tooltip="How captions call the subject of character and thing, such as the woman or the robot. "
                    "Empty: the character, or the object.",
                ),
                io.String.Input(
                    "more",
                    default="",
                    multiline=True,
                    placeholder="nothing",
                    tooltip="Added at the end, in your words.",
                ),
            ],
            outputs=[io.String.Output(display_name="STRING", tooltip="The instruction, for prompt of Generate Text.")],
        )

    @classmethod
    def execute(cls, of: str, name: str, more: str) -> io.NodeOutput:
        """Return the instruction."""
        return io.NodeOutput(instruction(of, name, more))


def instruction(of: str, name: str = "", more: str = "") -> str:
    """Write the instruction."""
    usual, text = INSTRUCTIONS[of]
    # By replacement: a name with braces is a name.
    return " ".join(filter(None, (text.replace("{name}", name.strip() or usual), ALONE, more.strip())))
