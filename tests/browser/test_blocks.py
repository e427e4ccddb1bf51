"""LoRA Blocks has a slider for each block: they show what the rules say and write rules, so nothing else is kept."""

import random
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comfy_client import ComfyServer
from lora_atelier.dev import PACK
from lora_atelier.trainer_core.lora_files.blocks import parse_rules

pytestmark = pytest.mark.browser

READY = "() => window.app?.extensionManager?.workflow?.activeWorkflow"
# A file -> LoRA Blocks -> LoRA Blocks -> a text; the second one knows its blocks from its runs alone.
BUILD = """name => {
    const { app, LiteGraph } = window, make = (type, x, y) => {
        const node = LiteGraph.createNode(type);
        node.pos = [x, y];
        app.graph.add(node);
        return node;
    };
    const input = (node, name) => node.inputs.findIndex(each => each.name === name);
    const file = make("AtelierLoadLoraFile", 60, 60), one = make("AtelierLoraBlocks", 420, 60);
    const two = make("AtelierLoraBlocks", 900, 60), text = make("PreviewAny", 1380, 60);
    file.widgets.find(widget => widget.name === "lora_name").value = name;
    for (const node of [one, two]) node.setSize([420, 480]);
    file.connect(0, one, input(one, "lora"));
    one.connect(0, two, input(two, "lora"));
    two.connect(3, text, 0);
    return [one.id, two.id];
}"""
SET = """([id, name, value]) => {
    window.app.graph.getNodeById(id).widgets.find(widget => widget.name === name).value = value;
}"""
GET = "([id, name]) => window.app.graph.getNodeById(id).widgets.find(widget => widget.name === name).value"
RULES = f"([id, text]) => ({GET})([id, 'rules']) === text"
SHOWS = (
    "([block, text]) => [...document.querySelectorAll('.atelier-blocks')].some(box => "
    "box.querySelector(`[data-block='${block}']`)?.nextElementSibling.textContent === text)"
)
PROMPT = "async () => (await window.app.graphToPrompt()).output"
SAVED = "id => window.app.graph.getNodeById(id).serialize().widgets_values"
RUN = "() => window.app.queuePrompt(0, 1)"
KEPT = "() => JSON.parse(localStorage.getItem('atelier.blocks')).map(([, blocks]) => blocks)"
EXECUTED = """() => {
    const ran = [];
    window.app.api.addEventListener("executing", ({ detail }) => detail && ran.push(String(detail)));
    return ran;
}"""


def flux(base: Path, name: str) -> str:
    """Write a LoRA with the blocks of Flux and of its text encoder; give its name."""
    layers = [f"lora_unet_double_blocks_{i}_img_attn_proj" for i in range(19)]
    layers += [f"lora_unet_single_blocks_{i}_linear1" for i in range(38)]
    layers += [f"lora_te1_text_model_encoder_layers_{i}_mlp_fc1" for i in range(12)]
    layers += ["lora_unet_final_layer_linear"]
    tensors = {}
    for layer in layers:
        tensors |= {f"{layer}.lora_up.weight": torch.ones(4, 2), f"{layer}.lora_down.weight": torch.ones(2, 4)}
    save_file(tensors, base / "models" / "loras" / f"{name}.safetensors")
    return f"{name}.safetensors"


def sliders(editor, block: str):
    """Find the sliders of a block, of all nodes."""
    return editor.page.get_by_role("slider", name=f"Factor of {block}", exact=True)


def show(editor, node: int) -> None:
    """Bring a node into view, so large that a mouse finds its sliders."""
    editor.run(
        """id => {
        const { pos } = window.app.graph.getNodeById(id), { ds } = window.app.canvas;
        ds.scale = 1;
        ds.offset = [300 - pos[0], 120 - pos[1]];
        window.app.canvas.setDirty(true, true);
    }""",
        node,
    )
    editor.settle()


def wait_for_rules(editor, node: int, text: str) -> None:
    """Wait until a node's rules are a text."""
    editor.page.wait_for_function(RULES, arg=[node, text])


def drag(editor, slider, share: float) -> None:
    """Drag a slider from where it is to a share of its length."""
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    here = float(slider.input_value()) / 2
    y = box["y"] + box["height"] / 2
    mouse = editor.page.mouse
    mouse.move(box["x"] + 8 + here * (box["width"] - 16), y)
    mouse.down()
    mouse.move(box["x"] + 8 + share * (box["width"] - 16), y, steps=4)
    mouse.up()


def test_sliders_show_and_write_the_rules(editor, server: ComfyServer, pytestconfig) -> None:
    page, look = editor.page, f"{'vue' if editor.vue else 'litegraph'}-{editor.version}"
    name = flux(server.base, f"flux-{look}")
    editor.run("() => localStorage.removeItem('atelier.blocks')")
    editor.run("() => window.app.refreshComboInNodes()")
    one, two = editor.run(BUILD, name)
    show(editor, one)
    sliders(editor, "double_blocks.18").wait_for()  # from the file's header: nothing ran yet
    assert page.get_by_role("slider").count() == 70
    page.get_by_text("After a run there is a slider for each block here.").wait_for()  # on the second
    editor.screenshot(f"blocks-file-{look}")

    # A slider writes its rule and nothing else; typed rules move the sliders.
    editor.run(SET, [one, "rules", "te*=0 # no words\nother=0.5, double_blocks.3=1.5 # faces"])
    page.wait_for_function(SHOWS, arg=["te1.layers.4", "0"])
    page.wait_for_function(SHOWS, arg=["double_blocks.3", "1.5"])
    assert sliders(editor, "te1.layers.4").input_value() == "0" and sliders(editor, "other").input_value() == "0.5"
    drag(editor, sliders(editor, "double_blocks.3"), 0.25)
    wait_for_rules(editor, one, "te*=0 # no words\nother=0.5, double_blocks.3=0.5 # faces")
    drag(editor, sliders(editor, "double_blocks.5"), 0.0)
    wait_for_rules(editor, one, "te*=0 # no words\nother=0.5, double_blocks.3=0.5 # faces\ndouble_blocks.5=0")
    editor.screenshot(f"blocks-rules-{look}")
    sliders(editor, "double_blocks.3").dblclick()
    wait_for_rules(editor, one, "te*=0 # no words\nother=0.5 # faces\ndouble_blocks.5=0")
    sliders(editor, "te1.layers.4").focus()
    page.keyboard.press("End")
    wait_for_rules(editor, one, "te*=0 # no words\nother=0.5 # faces\ndouble_blocks.5=0\nte1.layers.4=2")
    page.keyboard.press("ArrowLeft")
    last = "te*=0 # no words\nother=0.5 # faces\ndouble_blocks.5=0\nte1.layers.4=1.95"
    wait_for_rules(editor, one, last)
    page.keyboard.press("Control+z")
    wait_for_rules(editor, one, last.replace("1.95", "2"))
    page.wait_for_function(SHOWS, arg=["te1.layers.4", "2"])
    drag(editor, sliders(editor, "te1.layers.4"), 0.5)  # those of the node as the undo made it
    wait_for_rules(editor, one, last.replace("1.95", "1"))

    # Neither the prompt nor the file knows of the sliders.
    rules = editor.run(GET, [one, "rules"])
    assert editor.run(SAVED, one) == [rules, 1, 1]
    assert set(editor.run(PROMPT)[str(one)]["inputs"]) == {"lora", "rules", "rest", "strength"}

    # After a run the second node has sliders, too: of the blocks that are left. They act at the next run of it alone.
    editor.run(RUN)
    says = page.locator(".atelier-says")
    says.filter(has_text="58 layers of 58 are kept.").wait_for()
    show(editor, two)
    left = page.locator(".atelier-blocks").filter(has_not=page.locator("[data-block='double_blocks.5']"))
    left.locator("[data-block='single_blocks.7']").wait_for()
    assert left.locator("input").count() == 58
    drag(editor, left.locator("[data-block='single_blocks.7']"), 0.0)
    wait_for_rules(editor, two, "single_blocks.7=0")
    ran = page.evaluate_handle(EXECUTED)
    editor.run(RUN)
    says.filter(has_text="57 layers of 58 are kept.").wait_for()
    assert str(one) not in ran.json_value() and str(two) in ran.json_value()
    editor.settle()
    editor.screenshot(f"blocks-run-{look}")

    # After a reload rules and sliders are there again; in every run only where the workflow is opened again.
    assert sorted(map(len, editor.run(KEPT))) == [58]
    workflow = editor.run("() => window.app.graph.serialize()")
    if pytestconfig.getoption("thorough"):
        page.reload(wait_until="domcontentloaded")
        page.wait_for_function(READY)
    editor.run("() => window.app.graph.clear()")
    editor.load(workflow)
    assert [editor.run(GET, [node, "rules"]) for node in (one, two)] == [rules, "single_blocks.7=0"]
    for block in ("single_blocks.7", "double_blocks.5"):  # of the second, and of the first
        page.wait_for_function(SHOWS, arg=[block, "0"])


def test_what_the_sliders_cannot_show_is_said(editor, server: ComfyServer) -> None:
    look = f"{'vue' if editor.vue else 'litegraph'}-{editor.version}"
    name = flux(server.base, f"said-{look}")
    editor.run("() => window.app.refreshComboInNodes()")
    one, _ = editor.run(BUILD, name)
    show(editor, one)
    editor.run(SET, [one, "rules", "*attn*=1.2\n*=3"])
    editor.page.get_by_text("Not shown by sliders, since no block has this name: *attn*").wait_for()
    editor.page.wait_for_function(SHOWS, arg=["other", "3"])  # beyond the slider's end
    assert sliders(editor, "other").input_value() == "2"
    editor.run(SET, [one, "rules", ""])
    editor.run(SET, [one, "rest", 0])
    editor.page.wait_for_function(SHOWS, arg=["other", "0"])
    sliders(editor, "double_blocks.0").dblclick()
    wait_for_rules(editor, one, "double_blocks.0=1")  # only this block is kept
    editor.screenshot(f"blocks-said-{look}")


BLOCKS = ["te1.layers.0", "te1.layers.11", "double_blocks.3", "double_blocks.13", "middle_block", "other"]
PATTERNS = [
    *BLOCKS,
    "*",
    "te*",
    "*blocks*",
    "d?uble_blocks.*3",
    "*[0-3]",
    "*.[!0-2]",
    "[a-m]*",
    "[]x]*",
    "o[",
    "*k",
    "?*",
]
READ = f"""async ([blocks, texts]) => {{
    const {{ deciding, parse }} = await import("/extensions/{PACK}/rules.js");
    return texts.map(text => blocks.map(block => deciding(parse(text), block)?.factor ?? null));
}}"""
WRITE = f"""async asked => {{
    const {{ write }} = await import("/extensions/{PACK}/rules.js");
    return asked.map(([text, block, factor, rest]) => write(text, block, factor, rest, true));
}}"""


def factors(text: str) -> list[float | None]:
    """Read the factors of BLOCKS as the node does."""
    rules = parse_rules(text)
    return [next((f for pattern, f in reversed(rules) if fnmatchcase(block, pattern)), None) for block in BLOCKS]


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)  # the page's text functions are the same in both
def test_the_page_reads_and_writes_rules_as_the_node_does(editor) -> None:
    draw = random.Random(0)

    def rule() -> str:
        spaces = draw.choice(["", "", " "])
        number = draw.choice(["0", "1", "0.5", "-1.25", ".3", "2.", "1e-1", "+4"])
        return f"{spaces}{draw.choice(PATTERNS)}{spaces}={spaces}{number}"

    def line() -> str:
        rules = draw.choice([", ", ","]).join(rule() for _ in range(draw.choice([0, 1, 1, 1, 2, 3])))
        return rules + draw.choice(["", "", "", "# te*=7, x", " # why=1", " "])

    texts = ["\n".join(line() for _ in range(draw.randint(0, 6))) for _ in range(400)]
    assert editor.run(READ, [BLOCKS, texts]) == [factors(text) for text in texts]

    asked = [(t, draw.choice(BLOCKS), draw.choice([0, 0.05, 1, 1, 2]), draw.choice([1, 1, 0])) for t in texts]
    for (text, block, factor, rest), written in zip(asked, editor.run(WRITE, asked), strict=True):
        wanted = [factor if name == block else own for name, own in zip(BLOCKS, factors(text), strict=True)]
        found = factors(written)
        if factor == rest == 1:  # without a rule, where none is needed
            wanted[BLOCKS.index(block)] = found[BLOCKS.index(block)]
            assert found[BLOCKS.index(block)] in (1, None), (text, written)
            own = [pattern for pattern, _ in parse_rules(written) if pattern == block]
            assert bool(own) <= (found[BLOCKS.index(block)] == 1)
        assert found == wanted, (text, block, factor, written)
        assert comments(written) == comments(text)
        others = [[pair for pair in parse_rules(each) if pair[0] != block] for each in (text, written)]
        assert others[0] == others[1]


def comments(text: str) -> list[str]:
    """List the comments of rules."""
    return [line[line.index("#") :] for line in text.split("\n") if "#" in line]
