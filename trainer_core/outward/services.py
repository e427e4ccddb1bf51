"""The services, a row each: how each library hears of a run. Each is imported when it is first needed."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..common.sample_names import tag_of
from .event import About, Event
from .sender import Sender, Service
from .settings import Outward, ServiceSettings

USUAL = "lora-atelier"  # the project of trackers
LONGEST_VALUE = 250  # characters of a setting, as trackers take them
MOST_METRICS = 1000  # numbers in one call of mlflow
PICTURES = 8  # of one event


def _absent(package: str) -> str:
    return f"the package {package} is not installed; install it with ComfyUI's Python, or turn {package} off"


class Apprise:
    """Messages to chats, phones and mail boxes."""

    name, tracks = "apprise", False

    def __init__(self, choice: ServiceSettings, pictures: bool, _: Path) -> None:
        self._addresses, self._pictures = choice.secret.split(), pictures
        self._sends: Any = None

    def begin(self, about: About) -> None:
        """Read the addresses; raises ValueError for one of no known kind."""
        try:
            import apprise
        except ImportError as error:
            raise ValueError(_absent("apprise")) from error
        if not self._addresses:
            raise ValueError("there is no address; write one into its settings, as discord://…")
        self._title = about.name
        self._sends = apprise.Apprise(asset=apprise.AppriseAsset(app_id="LoRA Atelier", secure_logging=True))
        for number, address in enumerate(self._addresses, 1):
            if not self._sends.add(address):
                raise ValueError(f"address {number} is of no kind that apprise knows; check it")

    def take(self, events: Sequence[Event]) -> None:
        """Deliver each event as a message; raises RuntimeError where an address took none."""
        refused = False
        for event in events:
            pictures = [str(path) for path in event.pictures[:PICTURES]] if self._pictures else []
            refused |= not self._sends.notify(body=event.text, title=self._title, attach=pictures or None)
        if refused:
            raise RuntimeError("an address did not take a message; check the addresses")

    def end(self, failed: bool) -> None:
        """Do nothing: nothing is open."""


class Trackio:
    """Curves and samples in trackio's own folder."""

    name, tracks = "trackio", True

    def __init__(self, choice: ServiceSettings, pictures: bool, _: Path) -> None:
        self._project, self._pictures = choice.project or USUAL, pictures
        self._library: Any = None

    def begin(self, about: About) -> None:
        """Open the run, or one that it knows from before."""
        with contextlib.redirect_stdout(sys.stderr):  # it greets; a shell's output is for the run's events
            try:
                import trackio
            except ImportError as error:
                raise ValueError(_absent("trackio")) from error
            self._library = trackio
            config = {name: _plain(value) for name, value in about.settings.items()}
            quiet = {"auto_log_cpu": False, "auto_log_gpu": False}  # nothing of the machine
            trackio.init(project=self._project, name=about.run, config=config, resume="allow", embed=False, **quiet)

    def take(self, events: Sequence[Event]) -> None:
        """Log numbers and pictures."""
        for event in events:
            if values := _logged(event, self._library.Image if self._pictures else None):
                self._library.log(values, step=event.step)

    def end(self, failed: bool) -> None:
        """Close the run."""
        with contextlib.redirect_stdout(sys.stderr):
            self._library.finish()


class Wandb:
    """Curves and samples at Weights & Biases."""

    name, tracks = "wandb", True

    def __init__(self, choice: ServiceSettings, pictures: bool, folder: Path) -> None:
        self._choice, self._pictures, self._folder = choice, pictures, folder
        self._library: Any = None
        self._run: Any = None

    def begin(self, about: About) -> None:
        """Open the run, or one that it knows from before."""
        try:
            import wandb
        except ImportError as error:
            raise ValueError(_absent("wandb")) from error
        self._library = wandb
        self._folder.mkdir(parents=True, exist_ok=True)
        quiet = {"console": "off", "silent": True, "save_code": False, "disable_code": True, "disable_git": True}
        self._run = wandb.init(
            project=self._choice.project or USUAL,
            id="".join(letter if letter.isalnum() else "-" for letter in about.run)[-64:],
            name=about.name,
            config={name: _plain(value) for name, value in about.settings.items()},
            resume="allow",
            dir=str(self._folder),
            # Neither code, nor the console, nor what else the machine is and does.
            settings=wandb.Settings(
                api_key=self._choice.secret or None, x_disable_meta=True, x_disable_stats=True, **quiet
            ),
        )

    def take(self, events: Sequence[Event]) -> None:
        """Log numbers and pictures."""
        for event in events:
            if values := _logged(event, self._library.Image if self._pictures else None):
                self._run.log(values, step=event.step)

    def end(self, failed: bool) -> None:
        """Close the run."""
        self._run.finish(exit_code=int(failed))


class Mlflow:
    """Curves and samples at an mlflow server, or in its files."""

    name, tracks = "mlflow", True

    def __init__(self, choice: ServiceSettings, pictures: bool, _: Path) -> None:
        self._choice, self._pictures = choice, pictures
        self._client: Any = None
        self._id = ""

    def begin(self, about: About) -> None:
        """Open the run, or one that it knows from before."""
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ValueError(_absent("mlflow")) from error
        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=self._choice.secret or None)
        project = self._choice.project or USUAL
        known = client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else client.create_experiment(project)
        found = client.search_runs([experiment], f"tags.`atelier.run` = '{about.run}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        made = client.create_run(experiment, run_name=about.name, tags={"atelier.run": about.run})
        self._id = made.info.run_id
        params = [Param(_key(name), str(value)[:LONGEST_VALUE]) for name, value in about.settings.items()]
        for start in range(0, len(params), 100):
            client.log_batch(self._id, params=params[start : start + 100])

    def take(self, events: Sequence[Event]) -> None:
        """Log numbers in few calls, then pictures."""
        import time

        now = int(time.time() * 1000)
        metrics = [
            self._metric(_key(name), value, now, event.step) for event in events for name, value in event.values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MOST_METRICS])
        for path in (path for event in events for path in event.pictures if self._pictures):
            self._client.log_artifact(self._id, str(path), "samples")

    def end(self, failed: bool) -> None:
        """Close the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class ServiceRow(NamedTuple):
    """What the settings show of a service; huggingface_hub hears nothing of a run, and publishes LoRAs."""

    build: Callable[[ServiceSettings, bool, Path], Service] | None
    secret: str  # what its secret is; "" where it has none
    project: bool  # whether it sorts runs into projects


SERVICES: Mapping[str, ServiceRow] = {
    "apprise": ServiceRow(Apprise, "addresses", False),
    "trackio": ServiceRow(Trackio, "", True),
    "wandb": ServiceRow(Wandb, "token", True),
    "mlflow": ServiceRow(Mlflow, "address", True),
    "huggingface_hub": ServiceRow(None, "token", False),
}


def build_senders(outward: Outward, folder: Path) -> list[Sender]:
    """Build what tells the services that are on; folder: for what their libraries write."""
    return [
        Sender(row.build(outward.of(name), outward.pictures, folder / name), outward.events, outward.secrets)
        for name, row in SERVICES.items()
        if row.build is not None and outward.of(name).on
    ]


def deliver(outward: Outward, text: str) -> None:
    """Deliver one message by apprise now; raises what the library raises."""
    messages = Apprise(outward.of("apprise"), False, Path())
    messages.begin(About(name="LoRA Atelier"))
    messages.take([Event(kind="start", text=text)])


def finite_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """Leave out numbers that no curve can show."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _logged(event: Event, image: Callable[[str], Any] | None) -> dict[str, Any]:
    """Collect the numbers of an event, and its pictures where a library's class of pictures is given."""
    pictures = {_named(path): image(str(path)) for path in event.pictures} if image else {}
    return {**event.values, **pictures}


def _named(path: Path) -> str:
    """Name a sample by its prompt, as `samples/1`."""
    return f"samples/{tag_of(path.name)}"


def _key(name: str) -> str:
    """Write a name with the characters that mlflow takes."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)[:LONGEST_VALUE]


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | bool | None) else str(value)[:LONGEST_VALUE]
