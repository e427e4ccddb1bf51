"""Drive runs that are cut off, and compare what they leave behind."""

from __future__ import annotations

import csv
import itertools

import torch
from safetensors.torch import load_file, save

from lora_atelier.trainer_core.common.tensor_tree import load_state, pack
from lora_atelier.trainer_core.runs import open_run

TIMED = ("seconds", "peak_gb")  # columns of a log that no two runs share


class Cut(BaseException):
    """What a Cancel is to the core."""


def cut_at(step):
    """Return a callback for steps that ends the run after one of them."""

    def after(report):
        if report.step == step:
            raise Cut

    return after


def cut_inside(step, checks):
    """Return callbacks that end the run at the n-th time it asks whether to go on, once so many steps are over."""
    done, asked = [-1], [0]

    def check():
        if done[0] == step:
            asked[0] += 1
            if asked[0] == checks:
                raise Cut

    return {
        "step": lambda report: done.__setitem__(0, report.step),
        "resumed": lambda losses, *_: done.__setitem__(0, len(losses)),
        "check": check,
    }


def table(path):
    """Return the rows of a log without what depends on the clock."""
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMED} for row in csv.DictReader(file)]


def curves(folder):
    """Return the points of TensorBoard's curves, (step, value) by name, as TensorBoard itself shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != "time/seconds"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def state_files(result):
    """Return the state in the newest save of a result's run as bytes."""
    checkpoint = open_run(result.run).checkpoints()[0].path
    states = {name: load_state(checkpoint / f"{name}.safetensors") for name in ("weights", "optimizer", "history")}
    del states["weights"]["saves"]  # how many there were; a cut adds one
    packed = {name: pack(state) for name, state in states.items()}
    return {name: (save(tensors), repr(tree)) for name, (tensors, tree) in packed.items()}


def same(a, b, *, log=True):
    """Tell whether two results, and what lies on the disk of them, are the same to the last bit; raises where not."""
    assert equal(a.tensors, b.tensors)
    assert repr(a.losses) == repr(b.losses) and repr(a.concepts) == repr(b.concepts)  # NaN is NaN
    assert a.validation == b.validation and a.best == b.best
    assert torch.equal(a.samples, b.samples)
    assert len(a.others) == len(b.others)
    assert all(equal(load_file(x), load_file(y)) for x, y in zip(a.others, b.others, strict=True))
    assert a.embeddings.keys() == b.embeddings.keys()
    assert all(equal(load_file(a.embeddings[word]), load_file(b.embeddings[word])) for word in a.embeddings)
    ours, theirs = state_files(a), state_files(b)
    assert all(ours[name] == theirs[name] for name in ours), [name for name in ours if ours[name] != theirs[name]]
    if log and a.log and b.log:
        assert table(a.log / "log.csv") == table(b.log / "log.csv")
    return True


def apart(*numbers, least=1e-5):
    """Tell whether numbers all differ by more than rounding does, which is another one on another processor."""
    ordered = sorted(numbers)
    return all(high - low > least * max(abs(low), abs(high)) for low, high in itertools.pairwise(ordered))


def differ(a, b):
    """Tell whether two curves lie apart at any step, by more than rounding."""
    return len(a) == len(b) and any(map(apart, a, b))


def equal(a, b):
    """Tell whether tensors by name are the same to the last bit."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def close(mine, other, tolerance=1e-4):
    """Tell whether two tensors are as good as equal: the norm of their difference against that of the other."""
    return (mine - other).norm() <= tolerance * other.norm()
