"""Prompts with switches are read as sd-scripts reads them, and what cannot be read is named."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import (
    RunConfig,
    SampleConfig,
    SamplingDefaults,
    check_samples,
    parse_prompts,
)
from lora_atelier.trainer_core.config.base import LONGEST_TEXT
from lora_atelier.trainer_core.config.prompt_lines import KNOWN, MOST_PROMPTS, PromptLine
from lora_atelier.trainer_core.config.sample import OWN_SAMPLERS, OWN_SCHEDULERS
from lora_atelier.trainer_core.training.samplers import SAMPLERS, SCHEDULERS

PROMPTS = "sample_prompts of Saves & Samples"
SD = SamplingDefaults()
COMFYUI = SamplingDefaults(
    steps=8, cfg=1.0, sampler="res_multistep", samplers=("euler", "euler_ancestral", "dpmpp_2m", "ddim"), guidance=3.5
)


def only(text: str) -> PromptLine:
    """Read a text of one prompt."""
    (line,) = parse_prompts(text, PROMPTS)
    return line


def sets(text: str) -> dict[str, object]:
    """Read a prompt, and list what its line sets beside it."""
    line = dataclasses.asdict(only(text))
    return {name: value for name, value in line.items() if name not in ("text", "prompt") and value is not None}


def test_a_line_without_switches_is_a_prompt() -> None:
    assert only("  a cat, (red:1.2) ") == PromptLine(text="a cat, (red:1.2)", prompt="a cat, (red:1.2)")


def test_every_switch_sets_one_value() -> None:
    line = "a cat --n low quality, blurry --w 640 --h 512 --d 7 --s 28 --l 4.5 --g 3.5 --ss euler_a"
    assert only(line) == PromptLine(
        text=line,
        prompt="a cat",
        negative="low quality, blurry",
        width=640,
        height=512,
        seed=7,
        steps=28,
        cfg=4.5,
        guidance=3.5,
        sampler="euler_ancestral",
    )


def test_control_pictures_may_be_several() -> None:
    line = only("add a hat --ci /a b/1.png --s 8 --ci 2.png")
    assert (line.prompt, line.steps, line.controls) == ("add a hat", 8, ("/a b/1.png", "2.png"))
    both = SampleConfig(prompts=(line.text, "a cat")).pictures(SD)
    assert [picture.controls for picture in both] == [("/a b/1.png", "2.png"), ()]
    for text, error in (("a --ci 1" + " --ci 2" * 3, "--ci occurs more than 3 times"), ("a --ci", "--ci is ''")):
        with pytest.raises(ValueError, match=error):
            only(text)


@pytest.mark.parametrize(
    ("line", "prompt", "expected"),
    [
        ("a --W 100 --H 71", "a", {"width": 96, "height": 64}),  # rounded down, as sd-scripts does
        ("a --w 64 --h 8192", "a", {"width": 64, "height": 8192}),
        ("--n blurry", "", {"negative": "blurry"}),
        ("a --n", "a", {"negative": ""}),
        ("a --n --s 3", "a", {"negative": "", "steps": 3}),
        ("a\t--s\t3", "a", {"steps": 3}),
        ("a --l 7", "a", {"cfg": 7.0}),
        ("a --l .5 --g 0", "a", {"cfg": 0.5, "guidance": 0.0}),
        ("a --l 7.", "a", {"cfg": 7.0}),
        (f"a --d {2**64 - 1}", "a", {"seed": 2**64 - 1}),
        ("a --d 007", "a", {"seed": 7}),
        ("black--white, one--two", "black--white, one--two", {}),
        ("a -- b --- c -w 3 --(d)", "a -- b --- c -w 3 --(d)", {}),
        ("a --n x--w y -- z", "a", {"negative": "x--w y -- z"}),
        ("a # b", "a # b", {}),
        ("ein Büro, 猫 --n дом", "ein Büro, 猫", {"negative": "дом"}),
    ],
)
def test_what_a_line_sets(line: str, prompt: str, expected: dict[str, object]) -> None:
    assert only(line).prompt == prompt and sets(line) == expected


@pytest.mark.parametrize(
    ("name", "comfyui"),
    [
        ("ddim", "ddim"),
        ("euler", "euler"),
        ("k_euler", "euler"),
        ("euler_a", "euler_ancestral"),
        ("K_Euler_A", "euler_ancestral"),
        ("dpmsolver++", "dpmpp_2m"),
        ("heun", "heun"),
        ("dpm_2_a", "dpm_2_ancestral"),
        ("dpmpp_2m_sde", "dpmpp_2m_sde"),
    ],
)
def test_samplers_have_the_names_of_sd_scripts_and_of_comfyui(name: str, comfyui: str) -> None:
    assert only(f"a --ss {name}").sampler == comfyui


def test_empty_lines_and_lines_with_a_hash_are_left_out() -> None:
    text = "\n# a comment --x\n a cat --s 2\r\n\t\n  # another\na dog"
    assert [line.prompt for line in parse_prompts(text, PROMPTS)] == ["a cat", "a dog"]
    assert parse_prompts(" \n#\n", PROMPTS) == parse_prompts("", PROMPTS) == ()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a --x 3", f"--x in line 2 of {PROMPTS} is none of {KNOWN}; remove it, or write one of these."),
        ("a --cn pose.png", "--cn in line 2"),
        ("a --w=512", "--w=512 in line 2"),
        ("a --16mm film", "--16mm in line 2"),
        ("--size 3", "--size in line 2"),
        ("a --" + "x" * 100, f"--{'x' * 40}... in line 2"),
        ("a --w big", f"--w is 'big' in line 2 of {PROMPTS}; set it to a whole number from 64 to 8192."),
        ("a --w", "--w is '' in line 2"),
        ("a --w 63", "--w is '63'"),
        ("a --h 8193", "--h is '8193' in line 2"),
        ("a --h -64", "--h is '-64'"),
        ("a --w 512, b", "--w is '512, b'"),
        ("a --w ５１２", "--w is '５１２'"),
        ("a --s 0", "--s is '0' in line 2 of " + PROMPTS + "; set it to a whole number from 1 to 1000."),
        ("a --s 1001", "--s is '1001'"),
        ("a --s 2.5", "--s is '2.5'"),
        ("a --d -1", "--d is '-1'"),
        (f"a --d {2**64}", f"--d is '{2**64}'"),
        ("a --d " + "9" * 9000, f"--d is '{'9' * 40}...'"),
        ("a --l 0", "--l is '0' in line 2 of " + PROMPTS + "; set it to a number from 0.01 to 100."),
        ("a --l nan", "--l is 'nan'"),
        ("a --l 1e1", "--l is '1e1'"),
        ("a --l 1.2.3", "--l is '1.2.3'"),
        ("a --g 101", "--g is '101' in line 2 of " + PROMPTS + "; set it to a number from 0 to 100."),
        ("a --ss", "--ss is ''"),
        ("a --ss Euler a", "--ss is 'Euler a' in line 2 of " + PROMPTS + "; set it to the name of a sampler"),
        ("a --ss ../x", "--ss is '../x'"),
        ("a --w 512 --W 640", "--W occurs twice in line 2"),
        ("a --n b --n c", "--n occurs twice in line 2"),
        ("a" * (LONGEST_TEXT + 1), f"There are {LONGEST_TEXT + 1} characters in line 2"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(line: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_prompts(f"a cat --s 3\n{line}\na dog", PROMPTS)
    assert sentence in str(refusal.value) and PROMPTS in str(refusal.value)
    assert len(str(refusal.value)) < 250 and "\n" not in str(refusal.value)


def test_there_is_a_limit_to_the_number_of_prompts() -> None:
    assert len(parse_prompts("a\n#\n" * MOST_PROMPTS, PROMPTS)) == MOST_PROMPTS
    with pytest.raises(ValueError, match=f"There are {MOST_PROMPTS + 1} prompts in {PROMPTS}"):
        parse_prompts("a\n" * (MOST_PROMPTS + 1), PROMPTS)


@given(st.text(st.sampled_from("a -\n#whdslgn.0519"), max_size=60) | st.text(max_size=60))
def test_any_text_is_read_or_refused_in_a_sentence(text: str) -> None:
    try:
        lines = parse_prompts(text, PROMPTS)
    except ValueError as refusal:
        assert str(refusal).endswith(".") and PROMPTS in str(refusal)
        return
    assert [only(line.text) for line in lines] == list(lines)  # the kept text says the same again
    config = SampleConfig(prompts=tuple(line.text for line in lines))
    assert config.lines() == list(lines)
    assert all(picture.width % 8 == picture.height % 8 == 0 for picture in config.pictures(SD))


# --- all samples -------------------------------------------------------------------------------------------


def test_a_picture_takes_its_line_then_the_settings_then_the_models_own() -> None:
    prompts = ("a", "b --n none --w 128 --h 72 --s 3 --l 2 --d 40 --ss ddim --g 2", "c")
    first, second, third = SampleConfig(prompts=prompts, negative="dull", seed=5, cfg=6, height=64).pictures(COMFYUI)
    assert (first.negative, first.width, first.height, first.seed) == ("dull", 512, 64, 5)
    assert (first.steps, first.cfg, first.sampler, first.guidance) == (8, 6, "res_multistep", 3.5)
    assert (second.prompt, second.negative, second.width, second.height) == ("b", "none", 128, 72)
    assert (second.steps, second.cfg, second.sampler, second.guidance, second.seed) == (3, 2, "ddim", 2, 40)
    assert (third.prompt, third.seed, third.height) == ("c", 7, 64)
    assert SampleConfig(prompts=("a --n", "b"), negative="dull", seed=2**64 - 1).pictures(SD)[1].seed == 0
    assert SampleConfig(prompts=("a --n",), negative="dull").pictures(SD)[0].negative == ""


def test_sampler_and_scheduler_are_the_settings_unless_these_leave_them_open() -> None:
    first, second = SampleConfig(prompts=("a", "b --ss heun"), sampler="lms", scheduler="karras").pictures(COMFYUI)
    assert (first.sampler, first.scheduler) == ("lms", "karras")
    assert (second.sampler, second.scheduler) == ("heun", "karras")
    assert SampleConfig(prompts=("a",)).pictures(COMFYUI)[0].scheduler == COMFYUI.scheduler
    assert (tuple(SAMPLERS), SCHEDULERS) == (OWN_SAMPLERS, OWN_SCHEDULERS)


def test_texts_to_encode_have_no_switches() -> None:
    config = SampleConfig(prompts=("a --s 3", "b --n none", "c --n"), negative="dull")
    assert config.texts() == {"a", "b", "c", "none", "", "dull"}
    assert SampleConfig(prompts=("a",), negative="dull").texts() == {"a", "dull"}


def test_prompts_of_an_older_run_are_read_whatever_they_hold() -> None:
    config = RunConfig.from_dict(
        {
            "base_model": {"path": "x"},
            "dataset": {"concepts": [{"folder": "x"}]},
            "sample": {"prompts": ["a --x", "#b"]},
        }
    )
    assert config.sample.prompts == ("a --x", "#b")
    with pytest.raises(ValueError, match=f"--x in prompt 1 of {PROMPTS} is none of"):
        config.sample.lines()
    assert SampleConfig(prompts=("#b",)).pictures(SD)[0].prompt == "#b"


def test_what_a_model_does_not_have_is_refused_before_the_run() -> None:
    ways = SampleConfig(prompts=("a --ss k_euler", "b", "c --ss euler_a"))
    check_samples(ways, COMFYUI, "Flux")
    with pytest.raises(ValueError) as refusal:
        check_samples(ways, SamplingDefaults(samplers=("euler",)), "A model")
    assert str(refusal.value) == (
        f"Samples of A model are not drawn by the sampler euler_ancestral of prompt 3; set --ss in {PROMPTS} to "
        "euler, or remove it."
    )
    with pytest.raises(ValueError, match="by the sampler dpmpp_sde of prompt 1"):
        check_samples(SampleConfig(prompts=("a --ss dpmpp_sde",)), SD, "Stable Diffusion 1")
    with pytest.raises(ValueError, match="to one of euler, euler_ancestral, dpmpp_2m, ddim, or remove it"):
        check_samples(SampleConfig(prompts=("a --ss nothing",)), COMFYUI, "Flux")
    check_samples(SampleConfig(prompts=("a --g 4",)), COMFYUI, "Flux")
    with pytest.raises(ValueError, match="Prompt 2 sets --g, but Stable Diffusion 1 takes no distilled guidance"):
        check_samples(SampleConfig(prompts=("a", "b --g 4")), SD, "Stable Diffusion 1")
    with pytest.raises(ValueError, match="--x in prompt 1"):
        check_samples(SampleConfig(prompts=("a --x",)), SD, "Stable Diffusion 1")


def test_a_prompt_may_ask_for_a_caption():
    config = SampleConfig(prompts=("{caption}", "{caption} at night --d 3", "a cat")).with_caption("a --s 0\nmossling")
    assert [line.prompt for line in config.lines()] == ["a 0 mossling", "a 0 mossling at night", "a cat"]
    full = SampleConfig(prompts=("{caption}, {caption} --d 3",)).with_caption("word " * LONGEST_TEXT)
    assert full.lines()[0].seed == 3


def test_frames_are_of_a_line_then_of_all_and_rounded_down_to_what_the_model_takes():
    wan, ltx = SamplingDefaults(time=4, rate=16), SamplingDefaults(time=8, rate=25)
    config = SampleConfig(prompts=("a --f 20", "b", "c --f 1", "d --f 8"), frames=33)
    assert [(each.frames, each.rate) for each in config.pictures(wan)] == [(17, 16), (33, 16), (1, 0), (5, 16)]
    assert [(each.frames, each.rate) for each in config.pictures(ltx)] == [(17, 25), (33, 25), (1, 0), (1, 0)]
    check_samples(config, wan, "Wan")
    check_samples(SampleConfig(prompts=("a --f 1",)), SD, "Stable Diffusion 1")
    with pytest.raises(ValueError, match=r"Prompt 1 asks for 20 frames, but Flux draws .* set --f in sample_prompts"):
        check_samples(config, COMFYUI, "Flux")
    with pytest.raises(ValueError, match=r"Prompt 1 asks for 33 frames, but Flux .* set sample_frames of Saves & Samp"):
        check_samples(SampleConfig(prompts=("a",), frames=33), COMFYUI, "Flux")
    with pytest.raises(ValueError, match="but Wan draws single pictures from a control picture; set --f in sample_pro"):
        check_samples(SampleConfig(prompts=("a --f 5 --ci b.png",)), wan, "Wan")
    check_samples(SampleConfig(prompts=("a --f 5 --ci b.png",)), dataclasses.replace(wan, begins=True), "Wan")
    with pytest.raises(ValueError, match="--f is '0' in line 1 of prompts; set it to a whole number from 1 to 1024"):
        parse_prompts("a --f 0", "prompts")
