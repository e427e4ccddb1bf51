"""Compose the caption of each visit of a picture: shuffle, tag dropout, wildcards, prefix and suffix."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from ..common.rng import generator, sample_uniform
from ..config import CaptionConfig

SECONDARY_SEPARATOR = ";;;"  # glues tags that move and vanish together; becomes the separator
FIXED_SEPARATOR = "|||"  # head ||| flex ||| tail: only the tags between them are shuffled
# How many options a wildcard takes, {1-2$$a|b|c}, and what stands between them, {2$$ and $$a|b|c}.
SEVERAL = re.compile(r"\s*(\d{1,4})(-(\d{1,4})?)?\$\$(?:([^$|{}]{0,16})\$\$)?")
_LETTER = r"[^\W\d_]"  # so that from_left and left2 contain the word, and copyright does not
_SIDE = re.compile(rf"(?<!{_LETTER})(left|right)(y|most|wards?|side|hand(ed|er|edness)?)?(?!{_LETTER})", re.IGNORECASE)


def varies(captions: CaptionConfig, lines: Sequence[str]) -> bool:
    """Tell whether the captions of a picture with these text lines differ from visit to visit."""
    lines = _usable(lines, captions)
    if len(lines) > 1 or captions.dropout > 0 or captions.dropout_every_n_epochs:
        return True
    if captions.wildcards and any(map(has_wildcards, lines)):
        return True
    flex = [tag for line in lines for tag in _sections(_first_option(line, captions), captions)[1]]
    if captions.shuffle and len(set(flex)) > 1:
        return True
    protected = _folded(captions.protected)
    loses = captions.tag_dropout > 0 or captions.tag_warmup_steps > 0
    return loses and not all(_is_protected(tag, protected) for tag in flex)


def compose_caption(
    lines: Sequence[str],
    captions: CaptionConfig,
    *,
    seed: int,
    picture: int,
    visit: int,
    step: int | None = None,
) -> str:
    """Compose the final caption of one visit of one picture, a pure function of its arguments.

    step: of the run, counted from 0; None after any tag warm-up. Order: line, wildcards, split, head and tail, tag
    warm-up, shuffle, tag dropout, join, secondary separator, prefix and suffix, dropout of the whole caption. Prefix
    and suffix come after the shuffle, so that the trigger word stays in front. Each purpose has its own generator and
    each tag its own numbers, so that one setting does not change the random numbers of another.
    """
    if captions.dropout and sample_uniform(seed, "caption dropout", picture, visit) < captions.dropout:
        return ""
    text, turn = _draw_line(_usable(lines, captions), seed, picture, visit, captions.variants)
    if captions.wildcards:
        draws = generator(seed, "wildcard", picture, turn)
        text = _resolve(text, lambda count: int(torch.randint(count, (), generator=draws)), captions)
    step = None if step is None or step >= captions.tag_warmup_steps else step
    if captions.shuffle or captions.tag_dropout or step is not None:
        body = _join(_draw_tags(text, captions, generator(seed, "tags", picture, turn), step), captions)
    else:
        body = _tidy(text, captions)
    return _finish(body, captions)


def is_dropped(captions: CaptionConfig, epoch: int) -> bool:
    """Tell whether all captions of an epoch, counted from 0, are empty: every n-th one, as in sd-scripts."""
    every = captions.dropout_every_n_epochs
    return every > 0 and (epoch + 1) % every == 0


def warmed_up(tags: int, step: int, captions: CaptionConfig) -> int:
    """Count how many of a caption's tags are in use at a step of the tag warm-up.

    min + floor(step (tags - min) / steps), sd-scripts' token warm-up (`BaseDataset.process_caption`), in whole numbers.
    """
    least = captions.tag_warmup_min
    return least + step * (tags - least) // captions.tag_warmup_steps


def plain_caption(lines: Sequence[str], captions: CaptionConfig) -> str:
    """Compose the caption without random draws: first line, first option of each wildcard, all tags in order."""
    text = next(iter(_usable(lines, captions)), "")
    return _finish(_tidy(_first_option(text, captions), captions), captions)


def replace_word(text: str, word: str, instead: str) -> str:
    """Put another text in the place of a word, in any case and where it stands as a whole word."""
    return re.sub(rf"(?<!\w){re.escape(word.strip())}(?!\w)", lambda _: instead.strip(), text, flags=re.IGNORECASE)


def leave_out_word(text: str, word: str, separator: str = ",") -> str:
    """Leave a whole word out of a text, with the blanks around it and the tags that it alone made up."""
    shorter = replace_word(text, word, "")
    if shorter == text:
        return text
    tags = [" ".join(tag.split()) for tag in split_tags(shorter, separator)]
    return (separator if separator[-1].isspace() else separator + " ").join(tags)


def tags_of_lines(lines: Sequence[str], captions: CaptionConfig) -> list[set[str]]:
    """List the lower-case tags of each line of a picture; prefix and suffix count, of wildcards the first option."""
    found = []
    for line in _usable(lines, captions) or ("",):
        tags = [tag for part in _sections(_first_option(line, captions), captions) for tag in part]
        texts = (captions.prefix, _join(tags, captions), captions.suffix)
        found.append({tag.lower() for text in texts for tag in split_tags(text, captions.separator)})
    return found


def split_tags(text: str, separator: str = ",") -> list[str]:
    """Split a text into tags, stripped, without empty ones; blanks around the separator do not count."""
    return [tag for part in text.split(separator.strip() or separator) if (tag := part.strip())]


def mentions_side(text: str) -> bool:
    """Tell whether a text contains the words left or right, so that its picture should not be mirrored.

    Any case; from_left, left-handed, lefthanded, rightmost, rightwards count, copyright and leftover do not. Other
    meanings (all right) count too: rather too few pictures are mirrored than too many.
    """
    return _SIDE.search(text) is not None


def has_wildcards(text: str) -> bool:
    """Tell whether a text contains {a|b}, which wildcards would replace."""
    return bool(_wildcards(text)[0])


def _usable(lines: Sequence[str], captions: CaptionConfig) -> Sequence[str]:
    """List the lines that visits choose from."""
    if captions.lines == "join":
        return [" ".join(lines)]
    return lines if captions.lines == "draw" else lines[:1]


def _draw_line(lines: Sequence[str], seed: int, picture: int, visit: int, variants: int) -> tuple[str, int]:
    """Choose the line of a visit, and the number that its other draws take; each of n lines comes once in n visits.

    variants: how many such numbers a line has, used in turn; 0 or less: another one at every visit.
    """
    if len(lines) < 2:
        return lines[0] if lines else "", visit % variants if variants > 0 else visit
    cycle, position = divmod(visit, len(lines))
    line = int(torch.randperm(len(lines), generator=generator(seed, "line", picture, cycle))[position])
    return lines[line], cycle % variants * len(lines) + line if variants > 0 else visit


def _draw_tags(text: str, captions: CaptionConfig, draws: torch.Generator, step: int | None) -> list[str]:
    """Shuffle and drop the tags of a visit; head and tail stay. step: within the tag warm-up, None after it."""
    head, flex, tail = _sections(text, captions)
    numbers = torch.rand(len(head) + len(flex), 2, generator=draws, dtype=torch.float64)[len(head) :].tolist()
    protected = _folded(captions.protected)
    used = len(flex) if step is None else warmed_up(len(flex), step, captions)
    positions = [
        position
        for position, tag in enumerate(flex)
        if (position < used and numbers[position][0] >= _dropout_of(position, len(flex), captions))
        or _is_protected(tag, protected)
    ]
    if captions.shuffle:
        positions.sort(key=lambda position: numbers[position][1])
    return [*head, *(flex[position] for position in positions), *tail]


def _tidy(text: str, captions: CaptionConfig) -> str:
    """Resolve ||| and ;;; of a text whose tags keep their order; a text without them stays as it is."""
    if FIXED_SEPARATOR not in text and SECONDARY_SEPARATOR not in text:
        return text.strip()
    return _join([tag for part in _sections(text, captions) for tag in part], captions)


def flexible(sections: Sequence[Sequence[str]], captions: CaptionConfig) -> tuple[int, int, int]:
    """Find the tags that a run may shuffle and drop, in the sections of a text: (section, first tag, end)."""
    at, first = (0, captions.keep) if len(sections) == 1 else (1, 0)
    return at, min(first, len(sections[at])), len(sections[at])


def _sections(text: str, captions: CaptionConfig) -> tuple[list[str], list[str], list[str]]:
    """Split a text into the tags of the fixed head, the flexible tags, and the tags of the fixed tail."""
    parts = [split_tags(part, captions.separator) for part in text.split(FIXED_SEPARATOR)]
    at, first, end = flexible(parts, captions)
    head = [tag for part in (*parts[:at], parts[at][:first]) for tag in part]
    return head, parts[at][first:end], [tag for part in (parts[at][end:], *parts[at + 1 :]) for tag in part]


def _dropout_of(position: int, count: int, captions: CaptionConfig) -> float:
    """Compute the chance to drop the flexible tag at a position in the text's own order."""
    weighted = captions.tag_dropout_mode == "weighted"
    return captions.tag_dropout * (position + 1) / count if weighted else captions.tag_dropout


def _folded(tags: Sequence[str]) -> set[str]:
    return {tag.strip().casefold() for tag in tags}


def _is_protected(tag: str, protected: set[str]) -> bool:
    """Tell whether a tag, or one joined to it by ;;;, is never dropped."""
    return not protected.isdisjoint(_folded([tag, *tag.split(SECONDARY_SEPARATOR)]))


def _join(tags: Sequence[str], captions: CaptionConfig) -> str:
    separator = captions.separator
    between = separator if separator[-1].isspace() else separator + " "
    return between.join(tags).replace(SECONDARY_SEPARATOR, separator)


def _finish(body: str, captions: CaptionConfig) -> str:
    return " ".join(part for part in (captions.prefix.strip(), body, captions.suffix.strip()) if part)


def _first_option(text: str, captions: CaptionConfig) -> str:
    return _resolve(text, lambda count: 0, captions) if captions.wildcards else text


def _resolve(text: str, choose: Callable[[int], int], captions: CaptionConfig) -> str:
    """Replace the wildcards of a text; an empty option leaves no empty tag behind."""
    expanded = _expand(text, choose)
    if expanded == text:
        return text
    separator = captions.separator.strip() or captions.separator
    return separator.join(part for part in expanded.split(separator) if part.strip())


def _expand(text: str, choose: Callable[[int], int]) -> str:
    """Replace each {a|b} by option number `choose(count)`, from the inside out, and {{ }} by single braces.

    {2$$a|b|c} takes two different ones, {1-2$$a|b|c} one or two, and {2$$ and $$a|b|c} puts " and " between them.
    A pair of braces without |, and braces without a partner, stay as they are. Every pair of braces has its own
    call of `choose`, also inside an option that is not chosen.
    """
    bars, silent = _wildcards(text)
    owner = {bar: opening for opening, (_, positions) in bars.items() for bar in positions}
    closings = {closing for closing, _ in bars.values()}
    levels: list[list[list[str]]] = [[[]]]  # open pairs, their options, the pieces of each
    at = 0
    for mark in re.finditer(r"[{}|]", text):
        position = mark.start()
        levels[-1][-1].append(text[at:position])
        at = position + 1
        if position in bars:
            levels.append([[]])
        elif position in owner:
            levels[-1].append([])
        elif position in closings:
            options = levels.pop()
            levels[-1][-1].append(_chosen(["".join(option) for option in options], choose))
        elif position not in silent:
            levels[-1][-1].append(mark.group())
    return "".join([*levels[0][0], text[at:]])


def _chosen(options: list[str], choose: Callable[[int], int]) -> str:
    """Choose one of the options, or as many as the first one asks for with $$, as dynamic prompts write it."""
    several = SEVERAL.match(options[0])
    if several is None:
        return options[choose(len(options))]
    least, to, most, between = several.groups()
    left = [options[0][several.end() :], *options[1:]]
    low, high = (min(int(number), len(left)) for number in (least, most or (len(left) if to else least)))
    count = low + (choose(high - low + 1) if high > low else 0)
    return (", " if between is None else between).join(left.pop(choose(len(left))) for _ in range(count))


def _wildcards(text: str) -> tuple[dict[int, tuple[int, list[int]]], set[int]]:
    """Find opening -> (closing, bars) of each wildcard, and the positions of escaped braces.

    {{ }} is an escape where both braces close together, so that {{a|b}} means braces and {{a|b}|c} and {a|{b|c}}
    are nested; of braces without a partner, two in a row are one.
    """
    pairs: dict[int, int] = {}
    bars: dict[int, list[int]] = {}
    opened: list[int] = []
    lonely: list[int] = []
    for mark in re.finditer(r"[{}|]", text):
        position = mark.start()
        if mark.group() == "{":
            opened.append(position)
        elif mark.group() == "}":
            if opened:
                pairs[opened.pop()] = position
            else:
                lonely.append(position)
        elif opened:
            bars.setdefault(opened[-1], []).append(position)
    silent: set[int] = set()
    for position in sorted(alone := {*opened, *lonely}):
        if position - 1 in alone and position - 1 not in silent and text[position - 1] == text[position]:
            silent.add(position)
    for opening in sorted(pairs):
        closing = pairs[opening]
        if opening not in silent and pairs.get(opening + 1) == closing - 1:
            silent |= {opening + 1, closing - 1}
    found = {
        start: (pairs[start], positions) for start, positions in bars.items() if start in pairs and start not in silent
    }
    return found, silent
