"""The client of mlflow, with runs that lie in memory."""

from types import SimpleNamespace

taken: list[tuple] = []
experiments: dict[str, SimpleNamespace] = {}
runs: list[SimpleNamespace] = []


class MlflowClient:
    """Takes the news of runs."""

    def __init__(self, tracking_uri: str | None) -> None:
        taken.append(("client", tracking_uri))

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        """Find an experiment."""
        return experiments.get(name)

    def create_experiment(self, name: str) -> str:
        """Make an experiment."""
        experiments[name] = SimpleNamespace(experiment_id=f"of {name}")
        return experiments[name].experiment_id

    def search_runs(self, experiments: list[str], filter: str, max_results: int) -> list[SimpleNamespace]:
        """Find runs by their tag."""
        return [run for run in runs if f"'{run.tag}'" in filter][:max_results]

    def create_run(self, experiment: str, run_name: str, tags: dict) -> SimpleNamespace:
        """Open a run."""
        runs.append(SimpleNamespace(info=SimpleNamespace(run_id=f"id{len(runs)}"), tag=tags["atelier.run"]))
        taken.append(("run", experiment, run_name))
        return runs[-1]

    def update_run(self, run: str, status: str) -> None:
        """Open a run again."""
        taken.append(("again", run, status))

    def log_batch(self, run: str, metrics: list = (), params: list = ()) -> None:
        """Take numbers and settings."""
        assert len(metrics) <= 1000 and len(params) <= 100
        taken.append(("batch", run, list(metrics), list(params)))

    def log_artifact(self, run: str, path: str, folder: str) -> None:
        """Take a file."""
        taken.append(("file", run, path, folder))

    def set_terminated(self, run: str, status: str) -> None:
        """Close the run."""
        taken.append(("ended", run, status))
