"""Every reader of strangers' files with its budget, and generated files that try to exceed it.

As a program: `hostile_files.py EXAMPLES SEED` drives each reader with so many files, and prints what became of them.
"""

import io
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from films import animated, film
from PIL import Image
from run_folders import make_run

from lora_atelier.trainer_core.common.json_files import DEEPEST, LARGEST, read_json
from lora_atelier.trainer_core.common.tensor_tree import DISK_ERRORS, load_state
from lora_atelier.trainer_core.config import MaskConfig
from lora_atelier.trainer_core.config.prompt_lines import MOST_PROMPTS, parse_prompts
from lora_atelier.trainer_core.data.films import MOST_FRAMES, FilmError, examine_film
from lora_atelier.trainer_core.data.images import DECODER_ERRORS, load_picture
from lora_atelier.trainer_core.data.images import LARGEST as MOST_PIXELS
from lora_atelier.trainer_core.data.masks import examine_mask_clip, read_mask
from lora_atelier.trainer_core.data.scan.caption_files import TEXT_LIMIT
from lora_atelier.trainer_core.data.scan.caption_tables import (
    MOST_DEPTH,
    MOST_ENTRIES,
    TABLE_LIMIT,
    read_caption,
    read_table,
)
from lora_atelier.trainer_core.data.scan.own_file import LARGEST as LARGEST_OWN
from lora_atelier.trainer_core.data.scan.own_file import find_own, read_own
from lora_atelier.trainer_core.data.scan.sent import DEEPEST as DEEPEST_SENT
from lora_atelier.trainer_core.data.scan.sent import usable_names
from lora_atelier.trainer_core.lora_files.inspect import inspect_lora
from lora_atelier.trainer_core.lora_files.lora import read_lora
from lora_atelier.trainer_core.models.files.safetensors_file import LONGEST_HEADER, MOST_TENSORS, read_header
from lora_atelier.trainer_core.models.weights_of_file import open_weights
from lora_atelier.trainer_core.runs import describe
from lora_atelier.trainer_core.runs.catalogue import describe_in_detail
from lora_atelier.trainer_core.workflow.canvas import DEEPEST as DEEPEST_GRAPH
from lora_atelier.trainer_core.workflow.canvas import MOST_NODES, prompt_of
from lora_atelier.trainer_core.workflow.foreign.texts import LARGEST as LARGEST_SETTINGS
from lora_atelier.trainer_core.workflow.importing import bring
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.run_file import read_run

MEBIBYTE = 2**20
Make = Callable[[random.Random], bytes]


class Reader(NamedTuple):
    """What reads a kind of file, and what that may take."""

    read: Callable[[Path], object]
    make: Make  # a hostile file
    names: tuple[str, ...]  # that the file may have
    bytes: int  # of a file that is read
    items: int
    depth: int
    seconds: float = 10.0  # for a file
    mebibytes: int = 600  # for a file
    errors: tuple[type[BaseException], ...] = (ValueError, OSError)


# --- files ---------------------------------------------------------------------------------------------------

ODD_NUMBERS = ("9" * 6000, "1e999", "-" + "9" * 400, "NaN", "-0", "1e-999", "0.1")
ODD_TEXTS = ("", "\\ud800", "\\u0000", "../../x", "x" * 5000, "%s{0}", "\\u202e", "=1+1", "/dev/zero", "C:")


def value(draw: random.Random, depth: int = 0) -> str:
    """Write any JSON."""
    kind = draw.choice(["number", "text", "word", "list", "object"] if depth < 4 else ["number", "text", "word"])
    if kind == "number":
        return draw.choice(ODD_NUMBERS)
    if kind == "text":
        return f'"{draw.choice(ODD_TEXTS)}"'
    if kind == "word":
        return draw.choice(["null", "true", "false"])
    parts = [value(draw, depth + 1) for _ in range(draw.choice([0, 1, 3]))]
    if kind == "list":
        return f"[{', '.join(parts)}]"
    return "{" + ", ".join(f'"{draw.choice(["id", "type", "nodes", "a", "config"])}": {part}' for part in parts) + "}"


def spoiled(text: str | bytes, draw: random.Random) -> bytes:
    """Cut, repeat, nest or change bytes of a file."""
    content = bytearray(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    for _ in range(draw.randint(0, 3)):
        at, kind = draw.randrange(len(content) + 1), draw.randrange(6)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            content[at:at] = draw.choice([b"[", b"{", b'{"a":', b"(", b"- ", b"a."]) * 3000
        elif kind == 2:
            content[at : at + 3] = draw.randbytes(4)
        elif kind == 3:
            content[at:at] = bytes(content[:200]) * 50
        elif kind == 4:
            content[at:at] = draw.choice(ODD_NUMBERS).encode()
        else:
            content[at:at] = draw.choice([b"\0", b"\xff\xfe", b"\r", b"'", b'"', b"\\", b"\n" * 2000])
    return bytes(content)


def replaced(document: Any, draw: random.Random) -> bytes:
    """Put any values at some places of a document."""
    text = json.dumps(document)
    for _ in range(draw.randint(1, 3)):
        words = [word for word in ('"id": 1', '"type": "A"', "[]", "null", "0", '"a"', "1") if word in text]
        word = draw.choice(words or ["{"])
        at = draw.choice([found.start() for found in re.finditer(f"(?={re.escape(word)})", text)] or [0])
        new = f"{word.rpartition(' ')[0]} {value(draw)}" if ":" in word else value(draw)
        text = text[:at] + new + text[at + len(word) :]
    return spoiled(text, draw) if draw.random() < 0.4 else text.encode("utf-8", "replace")


def workflow(draw: random.Random) -> bytes:
    """Write a canvas file of a grammar: nodes, links, modes, subgraphs in one another, senders; then damage it."""

    def graph(depth: int) -> dict[str, Any]:
        kinds = ["A", "Reroute", "PrimitiveNode", "GetNode", "SetNode", "Anything Everywhere", "Any Switch (rgthree)"]
        count = draw.choice([1, 3, 12, 12, 300])
        kinds += [f"graph-{number}" for number in range(depth)]
        ends = [*range(-1, count + 1), -10, -20]
        nodes = [
            {
                "id": number,
                "type": draw.choice(kinds),
                "mode": draw.choice([0, 0, 0, 2, 4]),
                "inputs": [{"name": "a", "type": "X", "link": draw.choice([None, *range(count)])} for _ in range(2)],
                "outputs": [{"name": "a", "type": draw.choice("XY")}],
                "widgets_values": draw.choice([[], ["a"], {"a": 1}, None]),
            }
            for number in range(count)
        ]
        links = [[number, draw.choice(ends), 0, draw.choice(ends), 0, "X"] for number in range(count)]
        return {"nodes": nodes, "links": links, "inputs": [{"name": "a"}], "outputs": [{"name": "a"}]}

    subgraphs = [
        {"id": f"graph-{number}", **graph(number + draw.randint(0, 1))} for number in range(draw.randint(0, 4))
    ]
    document = {**graph(len(subgraphs)), "definitions": {"subgraphs": subgraphs}}
    return replaced(document, draw) if draw.random() < 0.5 else json.dumps(document).encode()


def prompt(draw: random.Random) -> bytes:
    nodes = {
        str(number): {"class_type": "A", "inputs": {"a": [str(draw.randint(0, 5)), 0], "b": 1}, "_meta": {"title": "a"}}
        for number in range(5)
    }
    return replaced(nodes, draw)


def safetensors(draw: random.Random) -> bytes:
    kinds = ("lora_up.weight", "lora_down.weight", "alpha", "hada_w1_a", "lokr_w1", "lokr_w2", "diff", "oft_blocks")
    header: dict[str, Any] = {}
    at = 0
    for kind in draw.sample(kinds, draw.randint(1, 4)):
        shape = draw.choice([[2, 2], [2**20, 1], [0], [], [1] * 9, [2**40, 0], [4, 1, 1, 1]])
        size = 4
        for side in shape:
            size *= side
        if size > 2**23:
            continue
        header[f"a.{kind}"] = {"dtype": draw.choice(["F32", "F32", "I64", "X"]), "shape": shape}
        header[f"a.{kind}"]["data_offsets"] = [at, at + size]
        at += size
    header["__metadata__"] = {"atelier.state": "[" * 3000, "lora_adapter_metadata": draw.choice(['{"a": 1}', "[" * 99])}
    text = json.dumps(header).encode()
    if draw.random() < 0.5:
        text = spoiled(text, draw)
    return len(text).to_bytes(8, "little") + text + bytes(at)


def picture(draw: random.Random) -> bytes:
    kind, file = draw.choice(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]), io.BytesIO()
    Image.new(draw.choice(["RGB", "L"]), (draw.choice([1, 64]), 48), 7).save(file, kind)
    content = bytearray(file.getvalue())
    if kind == "PNG" and draw.random() < 0.5:
        content[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
    return spoiled(bytes(content), draw)


@cache
def films() -> tuple[bytes, ...]:
    """Write a film of each kind, once."""
    kinds = (("mp4", "libx264"), ("mov", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx-vp9"))
    written = (film(8, format=kind, codec=codec) for kind, codec in kinds)
    return (*written, film(8, faststart=True), animated(4), animated(4, format="WEBP"))


def moving(draw: random.Random) -> bytes:
    """Spoil a film, mostly by single bytes, so that it still looks like one."""
    content = bytearray(draw.choice(films()))
    for _ in range(draw.randint(0, 12)):
        content[draw.randrange(len(content))] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
    if draw.random() < 0.3:
        at = draw.randrange(len(content) - 4)
        content[at : at + 4] = draw.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"])
    if draw.random() < 0.2:
        playlists = (
            b"ffconcat version 1.0\nfile /etc/passwd\n",
            b"#EXTM3U\nfile:///etc/passwd\n",
            b"concat:/etc/passwd",
        )
        return draw.choice(playlists) + bytes(content)
    return spoiled(bytes(content), draw) if draw.random() < 0.5 else bytes(content)


SETTINGS = (
    'learning_rate = [1, 2]\nnetwork_module = "networks.lora"\ndataset_config = "/etc/passwd"\nnetwork_dim = 8\n',
    '[general]\nresolution = 512\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = 1\n',
    "job: extension\nconfig:\n  name: a\n  process:\n  - type: sd_trainer\n    network: {type: lora, linear: 8}\n",
    '{"training_method": "LORA", "learning_rate": 0.1, "concepts": [{"path": "a"}], "lora_rank": 8}',
    '{"LoRA_type": "Standard", "learning_rate": "1", "train_data_dir": "a", "network_dim": 8}',
    '{"model_type": "lora", "lora_rank": 8, "data_backend_config": "a.json", "learning_rate": 1}',
    "#!/bin/bash\nRATE=1e-4\naccelerate launch train_network.py --learning_rate=$RATE \\\n --network_dim 8\n",
    "set R=1\npython train_network.py --learning_rate %R% ^\n --network_dim 8\n",
    "$rate = 1\npython train_network.py --learning_rate $rate `\n --network_dim 8\n",
)


def foreign(draw: random.Random) -> bytes:
    text = draw.choice(SETTINGS)
    for _ in range(draw.randint(0, 2)):
        word = draw.choice(["8", "1", "a", "512", "0.1", "lora"])
        text = text.replace(word, draw.choice([*ODD_NUMBERS, "[]", "[1]", "{}", '""', "null", "true", "'"]), 1)
    return spoiled(text, draw) if draw.random() < 0.6 else text.encode()


def of_text(*texts: str) -> Make:
    return lambda draw: spoiled(draw.choice(texts), draw)


RUN = '[base_model]\npath = "x"\n[[dataset.concepts]]\nfolder = "y"\n[train]\nsteps = 1\n'


# --- readers -------------------------------------------------------------------------------------------------


def of_films(read: Callable[[bytes], object]) -> Reader:
    """Describe what reads the content of a film."""
    return Reader(
        lambda path: read(path.read_bytes()),
        moving,
        ("a.mp4", "a.webm"),
        MOST_PIXELS,
        MOST_FRAMES,
        0,
        mebibytes=1200,
        errors=(FilmError,),
    )


def in_run(*names: str) -> Callable[[Path], object]:
    """Look at a run whose files are replaced, as lists and pages do."""

    def look(path: Path) -> object:
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(Path(folder), "odd", saves=(2,), logged=2, finished=2, steps=2).path
            for name in names:
                (run / name).write_bytes(path.read_bytes())
            return describe(run, verify=True), json.dumps(describe_in_detail(run), allow_nan=False)

    return look


def pictures_of_a_run(draw: random.Random) -> bytes:
    """Write what the watch of a run found about its pictures, with names of any kind."""
    texts = ["a.png", "../../x", "x" * 5000, "\u202e", "\0", "\ud800", "/dev/zero", "<b>", 1, None, ["a"]]
    numbers = [0.5, -1, 1e300, 10**400, "1", None, True]
    pictures = [
        {"name": draw.choice(texts), "folder": draw.choice(texts), "sha256": draw.choice(texts)}
        | {"odd": draw.choice([True, True, False, 1, "true"]), "loss": draw.choice(numbers)}
        for _ in range(draw.choice([0, 1, 30, 3000]))
    ]
    document = {"pictures": draw.choice([pictures, pictures, pictures, {"0": pictures}, None])}
    return replaced(document, draw) if draw.random() < 0.5 else json.dumps(document).encode()


def own_settings(draw: random.Random) -> bytes:
    """Write what a folder sets for its pictures, for many of them, with names of any kind."""
    names = ["a.png", "A.PNG", "../a.png", "/a.png", "C:\\a.png", "\0", "\ud800", "e\u0301.png", "x" * 1025]
    names += ["e\u0301" * draw.choice([1, 500]) + str(number) for number in range(draw.choice([0, 3, 3000]))]
    values = [0.5, [1, 1], [0.5, 2], [10**400, 1], "train", "prior_prediction", 10**400, True, 0, None, {"focus": 1}]
    keys = ["focus", "repeats", "role", "leave_out", "leave_out", "other"]
    pictures = {
        name: {key: draw.choice(values) for key in draw.sample(keys, draw.randint(0, 2))}
        for name in draw.sample(names, draw.choice([1, len(names)]))
    }
    return (
        replaced({"pictures": pictures}, draw) if draw.random() < 0.5 else json.dumps({"pictures": pictures}).encode()
    )


def own_file(path: Path) -> object:
    found, _ = read_own(path.parent)
    if strange := [name for name in found if not (path.parent / name).resolve().is_relative_to(path.parent.resolve())]:
        raise AssertionError(f"{strange[0]!r:.80} lies elsewhere")
    return find_own(found, ["a.png", "\u00e9.png", *(f"\u00e9{number}" for number in range(3000))])


def upload(path: Path) -> object:
    """Name the files of an upload, which the page sends as a list."""
    sent = read_json(path)
    names = [name for name in usable_names([each for each in sent["files"] if isinstance(each, str)]) if name]
    if len({name.casefold() for name in names}) < len(names):
        raise AssertionError("two files have one name")
    if strange := [name for name in names if not (path.parent / name).resolve().is_relative_to(path.parent.resolve())]:
        raise AssertionError(f"{strange[0]!r:.80} lies elsewhere")
    return names


def sent_names(draw: random.Random) -> bytes:
    """Write paths of another computer: out of a folder, of devices, of many names that become one."""
    parts = [
        "a",
        "A",
        "..",
        ".",
        "",
        "con",
        "nul.txt",
        "C:",
        "\0",
        "\ud800",
        "\u202e",
        "x" * 300,
        "e\u0301",
        " ",
        "a?",
        "a*",
    ]
    ends = [".png", ".PNG", ".txt", ".exe", "", "-masklabel.png", ".json"]
    count = draw.choice([1, 50, 5000])
    paths = [
        draw.choice("/\\").join(draw.choices(parts, k=draw.randint(1, 5))) + draw.choice(ends) for _ in range(count)
    ]
    return json.dumps({"files": paths}).encode()


def model(path: Path) -> object:
    with open_weights(path) as weights:
        return [read() for read in weights.values()]


READERS = {
    "workflow": Reader(
        lambda path: prompt_of(read_json(path), {}), workflow, ("a.json",), LARGEST, MOST_NODES, DEEPEST_GRAPH
    ),
    "prompt": Reader(lambda path: prompt_of(read_json(path), {}), prompt, ("a.json",), LARGEST, MOST_NODES, DEEPEST),
    "run": Reader(
        in_run("run.json", "log.jsonl", "result.json", "published.json"),
        lambda draw: replaced({"format": 1, "name": "a", "created": 1, "config": {}, "steps": 1}, draw),
        ("a",),
        LARGEST,
        2000,
        DEEPEST,
    ),
    "save": Reader(
        in_run("checkpoints/step-00000002/checkpoint.json"),
        lambda draw: replaced({"format": 1, "step": 1, "files": {"a": {"size": 1}}, "time": 1}, draw),
        ("a",),
        LARGEST,
        2000,
        DEEPEST,
    ),
    "pictures of a run": Reader(in_run("pictures.json"), pictures_of_a_run, ("a",), LARGEST, 20_000, DEEPEST),
    "names of an upload": Reader(upload, sent_names, ("a.json",), LARGEST, 20_000, DEEPEST_SENT),
    "state of a save": Reader(
        load_state,
        safetensors,
        ("a.safetensors",),
        LONGEST_HEADER,
        MOST_TENSORS,
        DEEPEST,
        errors=(ValueError, *DISK_ERRORS),
    ),
    "LoRA": Reader(
        lambda path: inspect_lora(read_lora(path)[1]),
        safetensors,
        ("a.safetensors",),
        LONGEST_HEADER,
        MOST_TENSORS,
        DEEPEST,
    ),
    "checkpoint": Reader(
        lambda path: (read_header(path), model(path)),
        safetensors,
        ("a.safetensors", "a.ckpt"),
        LONGEST_HEADER,
        MOST_TENSORS,
        DEEPEST,
    ),
    "picture": Reader(
        load_picture, picture, ("a.png", "a.jpg", "a.gif"), MOST_PIXELS, 1, 0, mebibytes=1200, errors=DECODER_ERRORS
    ),
    "clip": of_films(examine_film),
    "clip of masks": of_films(lambda film: examine_mask_clip(film, MaskConfig())),
    "mask": Reader(
        lambda path: read_mask(path, MaskConfig()),
        picture,
        ("a.png",),
        MOST_PIXELS,
        1,
        0,
        mebibytes=1200,
        errors=DECODER_ERRORS,
    ),
    "caption": Reader(
        lambda path: read_caption(path, "auto", "all"),
        of_text("moss, green\n", '{"caption": "a", "tags": [1]}'),
        ("a.txt", "a.json"),
        TEXT_LIMIT,
        2**16,
        MOST_DEPTH,
    ),
    "table": Reader(
        read_table,
        of_text('{"a.png": "moss"}', "file_name,text\na.png,moss\n", '{"file_name": "a.png", "text": "b"}\n'),
        ("a.json", "a.csv", "a.jsonl", "a.tsv"),
        TABLE_LIMIT,
        MOST_ENTRIES,
        MOST_DEPTH,
    ),
    "settings of single pictures": Reader(
        own_file,
        own_settings,
        ("lora_atelier.json",),
        LARGEST_OWN,
        2000,
        DEEPEST,
    ),
    "settings of other programs": Reader(
        bring,
        foreign,
        ("a.toml", "a.yaml", "a.json", "a.sh", "a.bat", "a.ps1", "a.txt"),
        LARGEST_SETTINGS,
        20_000,
        DEEPEST,
    ),
    "run as TOML": Reader(lambda path: read_run(path, Folders()), of_text(RUN), ("a.toml",), LARGEST, 0, DEEPEST),
    "prompt file": Reader(
        lambda path: parse_prompts(path.read_text("utf-8", "replace"), "prompts"),
        of_text("moss --w 64 --h 64\n", "a --n b --d 9 --l 1.5\n"),
        ("a.txt",),
        TEXT_LIMIT,
        MOST_PROMPTS,
        0,
    ),
}


def taken(again: bool = False) -> float:
    """Measure the MiB that this process has at most taken; again: from now on."""
    if again and sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if sys.platform == "linux":  # ru_maxrss knows nothing of a new beginning
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_one(name: str, draw: random.Random) -> tuple[str, float, float]:
    """Read one hostile file; give what is wrong with that, "" for nothing, its seconds and MiB.

    Raises what its reader has no sentence for.
    """
    reader, message = READERS[name], ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / draw.choice(reader.names)
        path.write_bytes(reader.make(draw))
        before, began = taken(again=True), time.process_time()
        try:
            reader.read(path)
        except reader.errors as error:
            message = str(error)
        seconds, used = time.process_time() - began, taken() - before
    over = seconds > reader.seconds or used > reader.mebibytes or len(message) > 2000
    return f"{len(message)} characters, {seconds:.1f} s, {used:.0f} MiB" if over else "", seconds, used


def drive(name: str, examples: int, seed: int) -> dict[str, Any]:
    """Read so many hostile files; give how many, the slowest, the most memory, and the first faults."""
    faults, slowest, largest = [], 0.0, 0.0
    for number in range(examples):
        try:
            fault, seconds, used = read_one(name, random.Random(f"{seed}/{name}/{number}"))
        except Exception as error:
            raise AssertionError(f"file {number} of {name}, with seed {seed}, ends the reader") from error
        slowest, largest = max(slowest, seconds), max(largest, used)
        faults += [f"{number}: {fault}"] if fault else []
    return {"tried": examples, "faults": faults[:3], "slowest": round(slowest, 2), "mebibytes": round(largest)}


def drive_all(examples: int, seed: int, *names: str) -> dict[str, Any]:
    """Drive readers, by default all; tell whether asserts were checked."""
    return {"asserts": __debug__, "readers": {name: drive(name, examples, seed) for name in names or READERS}}


if __name__ == "__main__":
    print(json.dumps(drive_all(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
