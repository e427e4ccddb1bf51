"""A run's LoRA as it is published: its files, samples, and a card of what it is and how it was made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.wording import count, printable
from ..outward import Attempt, Outward, mask_logs, upload
from ..outward.hub import TAG, check_names
from .catalogue import describe_in_detail
from .detail import last_part, sample_files, settings_of
from .export import LONGEST_TITLE, sound_files
from .folder import Checkpoint, RunFolder

MOST_SAMPLES = 12  # pictures on a card
WORDS = "embeddings/"  # the folder of trained words
MOST_WORDS = 32  # trigger words on a card
_PREFIX = re.compile(r"dataset\.concepts\.\d+\.captions\.prefix")
_TOKEN = re.compile(r"lora\.embeddings\.\d+\.token")


def published_files_of(
    run: RunFolder, checkpoint: Checkpoint, *, licence: str, samples: bool = True
) -> dict[str, Path | bytes]:
    """Choose what is published of a save, by its name there; no name or text holds a place of this machine.

    samples: whether the pictures of the newest step up to the save go along. Raises ValueError for a damaged save.
    """
    from ..lora_files.write import has_layers  # here, so that other commands need not wait for torch

    name = re.sub(r"[^A-Za-z0-9.-]+", "_", title_of(run)).strip("._")[:LONGEST_TITLE] or "lora"
    files: dict[str, Path | bytes] = {}
    for ending, lora, words in sound_files(run, checkpoint):
        if has_layers(lora) or not words:
            files[f"{name}{ending}.safetensors"] = lora
        files |= {f"{WORDS}{name}{ending}-{token}.safetensors": word for token, word in words.items()}
    main = next(iter(files))  # the LoRA, or the first word where words were trained alone
    pictures = _pictures(run, checkpoint.step) if samples else []
    files |= {f"samples/{path.name}": path for path in pictures}
    return {"README.md": card(run, checkpoint, licence, pictures, main).encode(), **files}


def publish_at_hub(
    run: RunFolder,
    checkpoint: Checkpoint,
    outward: Outward,
    *,
    repository: str,
    licence: str,
    public: bool = False,
    samples: bool = True,
) -> str:
    """Publish the LoRA of a save with its card; return the address. outward: may hold a token for the hub.

    Raises ValueError with the reason, without the token, where it is not published.
    """
    check_names(repository, licence)
    files = published_files_of(run, checkpoint, licence=licence, samples=samples)
    message, address = f"Step {checkpoint.step} of {title_of(run)}", ""
    mask_logs(outward.secrets)
    with Attempt(outward.secrets) as attempt:
        token = outward.of("huggingface_hub").secret
        address = upload(files, repository, public=public, token=token, message=message)
    if attempt.problem:
        raise ValueError(f"huggingface_hub could not publish the LoRA: {attempt.problem}.")
    return address


def title_of(run: RunFolder) -> str:
    """Give the title of a run, or its name."""
    return run.title() or str(run.about["name"])


def trigger_words(run: RunFolder, settings: Mapping[str, Any]) -> list[str]:
    """List what begins the captions of a run's concepts, and the words that it trained."""
    found = [str(value).strip(" ,") for name, value in settings.items() if _PREFIX.fullmatch(name) and value]
    found += [str(value) for name, value in settings.items() if _TOKEN.fullmatch(name) and value]
    return list(dict.fromkeys(filter(None, found)))[:MOST_WORDS]


def card(run: RunFolder, checkpoint: Checkpoint, licence: str, pictures: list[Path], file: str) -> str:
    """Write the card of a LoRA, or of a word, as Markdown, with the head that the hub reads; file: its name."""
    word = file.startswith(WORDS)
    what, tag = ("An embedding", "textual_inversion") if word else ("A LoRA", "lora")
    use = f"Copy `{file}` into ComfyUI's `models/loras` and load it with *Load LoRA*."
    if word:
        plain = file.removeprefix(WORDS)
        name = plain.removesuffix(".safetensors")
        use = f"Copy `{plain}` into ComfyUI's `models/embeddings` and write `embedding:{name}` into a prompt."
    settings, title = settings_of(run), title_of(run)
    words = trigger_words(run, settings)
    about = describe_in_detail(run.path)
    prompts = about.get("prompts") or []
    shown = [(picture, _prompt_of(picture, prompts)) for picture in pictures]
    head = ["---", f"license: {licence}", "tags:", f"- {TAG}", f"- {tag}", "- text-to-image", "- comfyui"]
    if words:
        head.append(f"instance_prompt: {_quoted(', '.join(words))}")
    if shown:
        head.append("widget:")
        for picture, prompt in shown:
            head += [f"- text: {_quoted(prompt or '-')}", f"  output: {{url: samples/{picture.name}}}"]
    head.append("---")
    base = last_part(str(settings.get("base_model.path") or ""))
    facts = [
        f"- base model: {_plain(base)}" if base else "",
        f"- trigger words: {', '.join(f'`{_plain(word)}`' for word in words)}" if words else "- trigger words: none",
        f"- trained: {checkpoint.step} of {count(run.steps, 'step')}, on {count(about['pictures'] or 0, 'picture')}",
        f"- {about['loss_words']}" if about["loss_words"] and checkpoint.step == about["step"] else "",
    ]
    body = [
        "", f"# {_plain(title)}", "", f"{what}, trained by [LoRA Atelier](https://github.com/lora-atelier/lora-atelier).",
        "", *filter(None, facts), "",
        use, "",
    ]  # fmt: skip
    if shown:
        body += ["## Samples", ""]
        for picture, prompt in shown:
            body += [f"![{_plain(prompt)}](samples/{picture.name})", ""]
    body += ["## Settings", "", "| setting | value |", "|---|---|"]
    body += [
        f"| `{_plain(name)}` | {_plain(str(value))} |" for name, value in settings.items() if value not in (None, "")
    ]
    return "\n".join([*head, *body, ""])


def _pictures(run: RunFolder, step: int) -> list[Path]:
    """List the samples of the newest step up to one."""
    steps = {path: int(path.name.split("-")[1]) for path in sample_files(run)}
    newest = max((each for each in steps.values() if each <= step), default=None)
    return [path for path, each in steps.items() if each == newest][:MOST_SAMPLES]


def _prompt_of(picture: Path, prompts: list[str]) -> str:
    number = int(picture.stem.split("-")[2])
    return prompts[number - 1] if 0 < number <= len(prompts) else ""


def _quoted(text: str) -> str:
    """Write a text as YAML reads it; JSON's strings are YAML's."""
    return json.dumps(printable(text), ensure_ascii=False)


def _plain(text: str) -> str:
    """Write a text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(text))
