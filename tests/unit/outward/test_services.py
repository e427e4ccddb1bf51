"""Services hear of a run in a thread of their own: in order, once, and at no cost where they hang or fail."""

import logging
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from windows_rules import on_linux

from lora_atelier.trainer_core.outward import (
    MESSAGES,
    About,
    Attempt,
    Event,
    Outward,
    Sender,
    ServiceSettings,
    build_senders,
    deliver,
    mask_logs,
    masked,
    read_outward,
    sender,
    write_outward,
)

ABOUT = About(name="moss", run="moss-1a2b", settings={"train.steps": 4, "sample.prompts.1": "a moss"})
TOKEN = "tok_5e3cr3t-of-the-hook"
ADDRESS = f"discord://4711471147/{TOKEN}"
PATIENCE = 60  # seconds, for what takes none


def told(service: str, *events: Event, clock: Callable[[], float] = time.monotonic, **choice: object) -> list[str]:
    """Tell a service of events, and return the notes."""
    tells = sender_of(service, clock, **choice)
    for event in events:
        tells.put(ABOUT, event)
    return tells.close(PATIENCE)


def sender_of(service: str, clock: Callable[[], float] = time.monotonic, **choice: object) -> Sender:
    outward = Outward(services={service: ServiceSettings(on=True, **choice)}, events=MESSAGES, pictures=True)
    (tells,) = build_senders(outward, Path("unused"))
    tells._clock = clock
    return tells


def wait_for(done: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_messages_come_in_order_and_of_chosen_events_alone(library, tmp_path):
    apprise = library("apprise")
    outward = Outward(
        services={"apprise": ServiceSettings(on=True, secret=f"{ADDRESS} mail://b")}, events=("start", "end")
    )
    (tells,) = build_senders(outward, tmp_path)
    for kind in ("start", "step", "save", "end"):
        tells.put(ABOUT, Event(kind=kind, text=f"{kind}.", pictures=(tmp_path / "a.png",)))
    assert tells.close(PATIENCE) == []
    assert [(each["title"], each["body"], each["attach"]) for each in apprise.taken] == [
        ("moss", "start.", None), ("moss", "end.", None)
    ]  # fmt: skip
    assert apprise.taken[0]["to"] == [ADDRESS, "mail://b"]
    assert (
        build_senders(Outward(services={"apprise": ServiceSettings(secret=ADDRESS)}), tmp_path) == []
    )  # kept, but off


def test_a_library_that_is_absent_costs_one_note(library, monkeypatch):
    for service in ("apprise", "trackio", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, service, None)
        notes = told(service, *[Event(kind="start", text="on")] * 3, secret=ADDRESS)
        assert notes == [
            f"{service} did not hear of the run: the package {service} is not installed; install it with "
            f"ComfyUI's Python, or turn {service} off. The training is not affected."
        ]


def test_no_token_stands_in_a_note_or_a_log(library, caplog):
    apprise = library("apprise")
    apprise.behaviour = "raise"
    notes = told("apprise", *[Event(kind="save", text="saved")] * 9, secret=ADDRESS)
    assert len(notes) == 1 and "https://chat.example/api/***" in notes[0]
    assert TOKEN not in notes[0] and "4711471147" not in notes[0]
    assert sender.problems["apprise"] == notes[0]
    with pytest.raises(KeyError):  # which a route masks by an Attempt
        deliver(Outward(services={"apprise": ServiceSettings(secret=ADDRESS)}), "hello")
    apprise.behaviour = "take"
    assert told("apprise", Event(kind="save", text="saved"), secret=ADDRESS) == []
    assert sender.problems == {}

    mask_logs([ADDRESS])
    for handler in (caplog.handler, logging.lastResort):
        try:
            raise ValueError(f"at {ADDRESS}")
        except ValueError:
            record = logging.LogRecord("lib", 30, "", 1, "POST %s", (f"/api/{TOKEN}",), sys.exc_info())
        assert handler and handler.filter(record)
        assert TOKEN not in logging.Formatter().format(record) and "POST /api/***" in record.getMessage()


@pytest.mark.parametrize(("secret", "text", "left"), [
    ("hf_abcdefghijkl", "Bearer hf_abcdefghijkl of x", "Bearer *** of x"),
    ("mailto://me:pa55@mail.example?to=you", "login me with pa55 at mail.example", "login me with *** at mail.example"),
    ("https://me:p%40ssword@ml.example:5000", "p@ssword, p%40ssword, ml.example", "***, ***, ml.example"),
    ("tgram://123456789:AAbbCCddEE/42", "bot123456789:AAbbCCddEE/sent 42", "bot***:***/sent 42"),
    ("one://aaaaaaaaaa two://bbbbbbbbbb", "aaaaaaaaaa and bbbbbbbbbb", "*** and ***"),
    ("", "nothing", "nothing"),
])  # fmt: skip
def test_parts_of_an_address_are_masked_as_libraries_write_them(secret, text, left):
    assert masked(text, [secret]) == left


def test_a_service_that_hangs_costs_a_note_and_no_step(library):
    apprise = library("apprise")
    apprise.behaviour, now = "hang", [0.0]
    first = sender_of("apprise", lambda: now[0], secret=ADDRESS)
    first.put(ABOUT, Event(kind="start", text="on"))
    wait_for(lambda: first._busy is not None and not first._waiting)
    for number in range(10_000):
        first.put(ABOUT, Event(kind="save", text=f"{number}"))
    assert first.notes() == [] and len(first._waiting) == 10_000
    now[0] += sender.HANGS + 1
    for _ in range(3):
        first.put(ABOUT, Event(kind="save", text="later"))
    assert first.close(0) == [
        "apprise has not answered for 60 seconds; it hears nothing more of this run, whose training is not affected."
    ]
    assert not first._waiting
    second = sender_of("apprise", lambda: now[0], secret=ADDRESS)
    second.put(ABOUT, Event(kind="start", text="again"))
    assert second.close(PATIENCE) == ["apprise has not answered since an earlier run, so it is not told of this one."]
    assert second._thread is None  # so that no thread is left for each run
    apprise.behaviour = "take"
    apprise.release.set()
    assert first._thread
    first._thread.join(PATIENCE)
    assert told("apprise", Event(kind="start", text="third"), secret=ADDRESS) == []
    assert [each["body"] for each in apprise.taken] == ["on", "third"]


def test_a_service_that_fails_costs_one_note(library):
    apprise = library("apprise")
    apprise.behaviour = "refuse"
    tells = sender_of("apprise", secret=ADDRESS)
    for number in range(1, 9):
        tells.put(ABOUT, Event(kind="save", text=f"{number}"))
        wait_for(lambda: not tells._waiting and (tells._busy is None or tells._left))
    assert tells.close(PATIENCE) == [
        "apprise did not hear of the run: an address did not take a message; check the addresses. The training is "
        "not affected."
    ]
    assert 3 <= len(apprise.taken) < 8  # after three failures it is left alone


def test_the_end_of_a_run_waits_no_longer_than_it_may(library):
    apprise = library("apprise")
    apprise.behaviour = "hang"
    first = sender_of("apprise", secret=ADDRESS)
    first.put(ABOUT, Event(kind="end", text="over"))
    assert first.close(0.01) == ["apprise is slow to answer; it may miss the end of this run."]
    second = sender_of("apprise", secret=ADDRESS)
    second.put(ABOUT, Event(kind="end", text="over again"))
    apprise.release.set()
    assert second.close(PATIENCE) == []
    assert [each["body"] for each in apprise.taken] == ["over", "over again"]  # one after the other


def test_ten_thousand_steps_arrive_once_and_in_order(library, tmp_path, capsys):
    trackio = library("trackio")
    picture = tmp_path / "step-00000004-2.png"
    steps = [Event(kind="step", step=step, values={"loss": 1 / step}) for step in range(1, 10_001)]
    drawn = Event(kind="sample", step=9, pictures=(picture,))
    assert told("trackio", Event(kind="start", text="on"), *steps, drawn) == []
    (_, given), *logged, last = trackio.taken
    assert given["project"] == "lora-atelier" and given["name"] == "moss-1a2b" and given["resume"] == "allow"
    assert given["config"] == {"train.steps": 4, "sample.prompts.1": "a moss"}
    assert logged[:-1] == [("log", {"loss": 1 / step}, step) for step in range(1, 10_001)]
    assert logged[-1] == ("log", {"samples/2": ("picture", str(picture))}, 9)
    assert last == ("finish",)
    assert capsys.readouterr().out == ""  # where a shell's events stand


def test_of_more_events_than_wait_the_oldest_go(library, monkeypatch):
    monkeypatch.setattr(sender, "MOST_WAITING", 4)
    apprise = library("apprise")
    apprise.behaviour = "hang"
    tells = sender_of("apprise", secret=ADDRESS)
    tells.put(ABOUT, Event(kind="start", text="0"))
    wait_for(lambda: tells._busy is not None and not tells._waiting)
    for number in range(1, 8):
        tells.put(ABOUT, Event(kind="save", text=f"{number}"))
    apprise.release.set()
    assert tells.close(PATIENCE) == ["apprise was too slow for 3 events of this run."]
    assert [each["body"] for each in apprise.taken] == ["0", "4", "5", "6", "7"]


def test_wandb_gets_numbers_and_nothing_of_the_machine(library, tmp_path):
    wandb = library("wandb")
    outward = Outward(services={"wandb": ServiceSettings(on=True, secret=TOKEN, project="mine")})
    (tells,) = build_senders(outward, tmp_path)
    tells.put(ABOUT, Event(kind="step", step=3, values={"loss": 0.5}))
    tells.put(ABOUT, Event(kind="error", text="out"))
    assert tells.close(PATIENCE, failed=True) == []
    (_, given), log, end = wandb.taken
    assert (log, end) == (("log", {"loss": 0.5}, 3), ("finish", 1))
    assert given["project"] == "mine" and given["id"] == "moss-1a2b" and given["dir"] == str(tmp_path / "wandb")
    settings = given["settings"]
    assert settings["api_key"] == TOKEN and settings["console"] == "off"
    assert settings["x_disable_meta"] and settings["x_disable_stats"] and settings["disable_git"]


def test_mlflow_goes_on_with_the_run_that_it_knows(library, tmp_path):
    library("mlflow")
    tracking = library("mlflow.tracking")
    picture = tmp_path / "step-00000004-1.png"
    for step in (1, 2):
        events = Event(kind="step", step=step, values={"lr/unet(1)": 0.5}), Event(kind="sample", pictures=(picture,))
        assert told("mlflow", *events, secret="sqlite:///x.db") == []
    client, run, params, *rest = tracking.taken
    assert client == ("client", "sqlite:///x.db") and run == ("run", "of lora-atelier", "moss")
    assert params[3] == [("train.steps", "4"), ("sample.prompts.1", "a moss")]
    assert [each[0] for each in rest] == ["batch", "file", "ended", "client", "again", "batch", "file", "ended"]
    assert [(m.key, m.value, m.step) for m in rest[0][2]] == [("lr/unet_1_", 0.5, 1)]
    assert rest[2] == ("ended", "id0", "FINISHED") and rest[4] == ("again", "id0", "RUNNING")


@on_linux
def test_settings_are_read_back_by_their_owner_alone(tmp_path):
    file = tmp_path / "outward" / "settings.json"
    assert read_outward(file) == Outward()
    chosen = Outward().with_choice("apprise", on=True, secret=ADDRESS).with_choice("wandb", project="my cats")
    write_outward(file, chosen)
    assert read_outward(file) == chosen and chosen.secrets == [ADDRESS]
    assert TOKEN not in repr(chosen)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
    file.chmod(0o644)
    read_outward(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", [
    "{", "[]", '{"services": []}', '{"events": ["dance"]}', '{"pictures": 1}',
    '{"services": {"apprise": {"secret": 1}}}', f'{{"services": {{"apprise": {{"tok": "{TOKEN}"}}}}}}',
    '{"services": {"wandb": {"project": "../x"}}}', '{"services": {"apprise": {"secret": "a\\nb"}}}',
])  # fmt: skip
def test_damaged_settings_are_refused_without_a_word_of_them(tmp_path, text):
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="cannot be read") as refused:
        read_outward(file)
    assert TOKEN not in str(refused.value)


def test_an_attempt_swallows_what_a_library_raises_and_no_persons_wish():
    with Attempt() as attempt:
        sys.exit("bye")
    assert attempt.problem == "bye"
    with Attempt([TOKEN]) as attempt:
        raise OSError(f"no /home/me/x for {TOKEN}.\nsecond line")
    assert attempt.problem == "no /home/me/x for ***"
    with pytest.raises(KeyboardInterrupt), Attempt():
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("atelier-") and not thread.daemon]
