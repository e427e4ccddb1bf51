"""How a run goes on from a save of another one: whose learning rate curve it follows from there."""

from __future__ import annotations

from ..common.values import is_count, is_object
from ..common.wording import count
from ..config import RunConfig, SchedulerConfig, setting
from ..optim.schedule import Curve, check_length, curve_of, factor_on
from ..runs import Join, Joins, RunFolder

LITTLE = 0.01  # share of the full learning rate below which added steps change little


def joins(config: RunConfig, steps: int) -> Joins:
    """Return a function that tells how a run of `steps` goes on from a save of another run of the same course.

    The learning rate never jumps up there by itself: where the curve of the longer run differs, it keeps that of the
    other run, whose last factor the added steps keep. Only planned_steps asks for another curve.
    """
    train, scheduler = config.train, config.scheduler
    wanted = curve_of(steps, scheduler)

    def join(run: RunFolder, step: int) -> Join | None:
        own = run_curve(run, scheduler)
        if own is None:
            return None
        if any(factor_on(own, k, scheduler) != factor_on(wanted, k, scheduler) for k in range(step)):
            if scheduler.planned_steps:
                sentence = "Up to there its learning rate followed the curve of another length, and then that of "
                sentence += f"planned_steps, {scheduler.planned_steps}."
                return Join(at_end=True, sentence=sentence) if run.steps < steps else None
            if run.steps == steps:
                return Join(about={"curve": own}) if own.last < run.steps - 1 else None
            return _kept(run, own, step, steps, config)
        if run.steps == steps:
            return Join()
        if any(word.stop and word.stop_unit == "share" for word in config.lora.embeddings):
            return Join(at_end=True, sentence="Up to there its embeddings stopped as in a run of that length.")
        if step == run.steps and train.accumulate > 1:  # the last step may accumulate fewer batches
            return Join(at_end=True, sentence="Its last step may have had fewer pictures.")
        if step == run.steps and train.keeps_by and step % train.validate_every:
            sentence = "It was measured once more, at its end, and these weights count among the best."
            return Join(at_end=True, sentence=sentence)
        return Join()

    return join


def _kept(run: RunFolder, own: Curve, step: int, steps: int, config: RunConfig) -> Join:
    """Go on with the curve of another run, whose last factor stays."""
    factor, length = factor_on(own, own.last, config.scheduler), count(own.length, "step")
    remedy = f"For a curve over all {steps} steps, set {setting('scheduler.planned_steps')} to {steps}."
    little = ", so they change little" if factor < LITTLE else ""
    kept = f"Its curve of {length} stays: later steps have {factor:.2g} of the full learning rate{little}. {remedy}"
    refusal = f"The curve of the run {run.path.name} ended at 0, so later steps would train nothing. {remedy}"
    return Join(at_end=step <= own.last, sentence=kept, refusal="" if factor else refusal, about={"curve": own})


def run_curve(run: RunFolder, config: SchedulerConfig) -> Curve | None:
    """Read the learning rate curve of a run with these settings, whatever its planned_steps; None if it has none."""
    stored, settings = run.about.get("curve"), run.about.get("config", {}).get("scheduler")
    planned = settings.get("planned_steps") if is_object(settings) else 0
    if isinstance(stored, list | tuple) and len(stored) == 2 and all(map(is_count, stored)):
        curve = Curve(*stored)
    else:
        curve = Curve(planned if is_count(planned) and planned else run.steps, run.steps - 1)
    try:
        check_length(curve.length, config.replace(planned_steps=0))
    except ValueError:  # of a damaged run.json
        return None
    return curve
