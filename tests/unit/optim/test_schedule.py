"""Learning-rate curves: the table, transformers' and torch's schedules, behaviour after the end, what is refused."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from bounded import bounded
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import SchedulerConfig
from lora_atelier.trainer_core.config.rows import without_effect
from lora_atelier.trainer_core.config.scheduler import SHAPES
from lora_atelier.trainer_core.optim.expression import LONGEST, read_expression
from lora_atelier.trainer_core.optim.schedule import (
    FORMULAS,
    NAMES,
    check_curve,
    check_length,
    check_schedule,
    curve_of,
    factor_on,
    lr_factor,
    warmup_steps,
)

STEPS = 3000  # a multiple of 2 and 3 cycles, so that every position of the table is a step
TABLE = {  # value at 0, .1, .25, .5, .75, .9, .99, 1 of the run
    ("constant",): (1,) * 8,
    ("linear",): (1, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01, 0),
    ("cosine",): (1, 0.9755, 0.8536, 0.5, 0.1464, 0.0245, 0.0002, 0),
    ("cosine_with_restarts", ("cycles", 2)): (1, 0.9045, 0.5, 1, 0.5, 0.0955, 0.0010, 0),
    ("cosine_soft_restarts", ("cycles", 2)): (1, 0.7939, 0.1464, 0.5, 0.8536, 0.2061, 0.0022, 0),
    ("polynomial", ("power", 2)): (1, 0.81, 0.5625, 0.25, 0.0625, 0.01, 0.0001, 0),
    ("inverse_sqrt", ("timescale", STEPS // 10)): (1, 0.7071, 0.5345, 0.4082, 0.3430, 0.3162, 0.3029, 0.3015),
    ("warmup_stable_decay", ("decay_share", 0.2)): (1, 1, 1, 1, 1, 0.5, 0.05, 0),
    ("rex", ("d", 0.9)): (1, 0.9890, 0.9677, 0.9091, 0.7692, 0.5263, 0.0917, 0),
    ("rex", ("d", 0.5)): (1, 0.9474, 0.8571, 0.6667, 0.4, 0.1818, 0.0198, 0),
    ("rex_restarts", ("cycles", 2), ("gamma", 0.9)): (1, 0.9756, 0.9091, 0.9, 0.8182, 0.6429, 0.1525, 0),
    ("rex_restarts", ("cycles", 3), ("gamma", 0.5)): (1, 0.9589, 0.7692, 0.4545, 0.2419, 0.2027, 0.0591, 0),
    ("cosine", ("min_lr_ratio", 0.1)): (1, 0.9780, 0.8682, 0.55, 0.2318, 0.1220, 0.1002, 0.1),
    ("one_cycle", ("min_lr_ratio", 0.2), ("start", 0.2)): (0.2, 0.4, 0.9464, 0.8494, 0.4265, 0.2396, 0.2004, 0.2),
    ("points", ("points", "0:0, 0.5:2; 0.5:1,\n0.9:0.5")): (0, 0.4, 1, 1, 0.6875, 0.5, 0.5, 0.5),
    ("expression", ("expression", "max(0, 1 - t) ** 2 if step < total / 2 else 0.5 * (t > 0.8)")): (
        (1, 0.81, 0.5625, 0, 0, 0.5, 0.5, 0.5)
    ),
}


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_the_table(case):
    name, *fields = case
    config = SchedulerConfig(name=name, **dict(fields))
    check_schedule(STEPS, config)
    values = [lr_factor(round(STEPS * p), STEPS, config) for p in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)]
    assert values == pytest.approx(TABLE[case], abs=6e-5)


def one_cycle_of_torch(optimizer: torch.optim.Optimizer, warmup: int, steps: int):
    """Return torch's, whose phases end at whole steps, set so that they end where ours do."""
    share = (0.3 * (steps - warmup) + 1) / (steps - warmup + 1)
    settings = {"pct_start": share, "div_factor": 25, "final_div_factor": 1e12, "cycle_momentum": False}
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, steps - warmup + 1, **settings)


PEERS = {  # name: fields, and the peer built of optimizer, warm-up and all steps; torch's begins after the warm-up
    "constant": ({}, lambda o, w, n: transformers.get_constant_schedule_with_warmup(o, w)),
    "linear": ({}, transformers.get_linear_schedule_with_warmup),
    "cosine": ({}, transformers.get_cosine_schedule_with_warmup),
    "cosine_with_restarts": (
        {"cycles": 4},
        lambda o, w, n: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, w, n, 4),
    ),
    "polynomial": (
        {"power": 2.5},
        lambda o, w, n: transformers.get_polynomial_decay_schedule_with_warmup(o, w, n, lr_end=0, power=2.5),
    ),
    "inverse_sqrt": ({"timescale": 30}, lambda o, w, n: transformers.get_inverse_sqrt_schedule(o, w, 30)),
    "warmup_stable_decay": (
        {"decay_share": 0.3, "decay_shape": "1-sqrt"},
        lambda o, w, n: transformers.get_wsd_schedule(o, w, round(0.3 * (n - w)), n, decay_type="1-sqrt"),
    ),
    "one_cycle": ({}, one_cycle_of_torch),
}


@pytest.mark.parametrize("name", PEERS)
def test_after_the_warm_up_the_curves_are_those_of_transformers_and_torch(name):
    fields, build = PEERS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = SchedulerConfig(name=name, warmup_steps=10, **fields)
    reference = build(optimizer, 10, 110)
    for step in range(10 if name == "one_cycle" else 0, 110):
        if step >= 10:
            assert lr_factor(step, 110, config) == pytest.approx(reference.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_the_other_shapes_of_the_decay_are_those_curves_in_its_part_of_the_run(shape):
    config = SchedulerConfig(name="warmup_stable_decay", decay_share=0.25, decay_shape=shape)
    values = [lr_factor(step, 100, config) for step in range(75, 101)]
    assert values == pytest.approx([lr_factor(step, 25, SchedulerConfig(name=shape)) for step in range(26)])


def test_rex_with_a_warm_up():
    config = SchedulerConfig(name="rex", warmup_steps=10)
    values = [lr_factor(step, 100, config) for step in (0, 4, 9, 10, 55, 99, 100, 150)]
    assert values == pytest.approx([0.1, 0.5, 1, 1, 0.9091, 0.1010, 0, 0], abs=5e-5)


def test_a_warm_up_rises_to_where_the_curve_begins():
    config = SchedulerConfig(name="points", points="0:0.5, 1:0", warmup_steps=4)
    assert [lr_factor(step, 8, config) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.375]


def test_a_warm_up_in_percent_is_of_the_whole_curve():
    config = SchedulerConfig(warmup_steps=5, warmup_unit="percent")
    assert [warmup_steps(steps, config) for steps in (1000, 90, 9)] == [50, 5, 0]
    planned = config.replace(planned_steps=2000)
    assert lr_factor(99, 1000, planned) == 1 and lr_factor(98, 1000, planned) < 1


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({"cycles": 2}, [500, 500]),
        ({"cycles": 3}, [333, 334, 333]),
        ({"cycles": 3, "cycle_multiplier": 2}, [143, 286, 571]),
    ],
)
def test_cycles_of_rex_with_restarts_have_these_lengths(fields, lengths):
    config = SchedulerConfig(name="rex_restarts", gamma=1, **fields)
    peaks = [step for step in range(1001) if step == 1000 or lr_factor(step, 1000, config) == 1]
    assert [b - a for a, b in pairwise(peaks)] == lengths


def test_every_shape_has_a_formula():
    assert set(FORMULAS) == set(SHAPES)


def test_a_cycle_of_rex_with_restarts_ends_at_the_floor_and_its_peak_is_not_below_it():
    config = SchedulerConfig(name="rex_restarts", cycles=3, gamma=0.5, min_lr_ratio=0.4)
    values = [lr_factor(step, 300, config) for step in (0, 99, 100, 199, 200, 250, 300)]
    assert values[0] == 1 and values[2] == 0.5 and values[4:] == [0.4, 0.4, 0.4]
    assert 0.4 < values[1] < 0.5 and 0.4 < values[3] < 0.41


@examples(150)
def of_shape(name: str, **values: Any) -> SchedulerConfig:
    """Build a schedule of the settings that act with its shape."""
    left_out = without_effect(SchedulerConfig, {"name": name, **values})
    return SchedulerConfig(name=name, **{key: value for key, value in values.items() if key not in left_out})


@given(
    name=st.sampled_from([name for name in SHAPES if name not in ("expression", "points")]),
    steps=st.integers(2, 400),
    warmup=st.integers(0, 99),
    unit=st.sampled_from(["steps", "percent"]),
    planned=st.integers(0, 400),
    floor=st.floats(0, 1),
    d=st.floats(0, 0.999),
    gamma=st.floats(0, 1),
    cycles=st.integers(1, 6),
    multiplier=st.floats(0.1, 3),
    share=st.floats(0.001, 0.999),
    shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
    power=st.floats(0.01, 100),
)
def test_built_in_curves_stay_between_0_and_1_and_never_rise_after_the_end(
    name, steps, warmup, unit, planned, floor, d, gamma, cycles, multiplier, share, shape, power
):
    config = of_shape(
        name,
        warmup_steps=warmup,
        warmup_unit=unit,
        planned_steps=planned,
        min_lr_ratio=floor,
        d=d,
        gamma=gamma,
        cycles=cycles,
        cycle_multiplier=multiplier,
        decay_share=share,
        decay_shape=shape,
        rise_share=share,
        start=gamma,
        power=power,
    )
    try:
        check_length(steps, config)
    except ValueError:
        assume(False)
    values = [lr_factor(step, steps, config) for step in range(max(steps, planned) + 50)]
    end = planned or steps
    assert all(0 <= value <= 1 for value in values)
    assert all(value == values[end] for value in values[end:])
    after = warmup_steps(steps, config)
    assert all(value >= floor * (1 - 1e-12) for value in values[after:])
    if name in ("constant", "linear", "cosine", "polynomial", "inverse_sqrt", "warmup_stable_decay", "rex"):
        assert all(later <= earlier + 1e-15 for earlier, later in pairwise(values[after:]))


def test_a_planned_length_keeps_the_curve_when_the_run_becomes_longer_or_shorter():
    config = SchedulerConfig(min_lr_ratio=0.1)
    whole = [lr_factor(step, 100, config) for step in range(100)]
    kept = config.replace(planned_steps=100)
    for steps in (60, 150):
        check_schedule(steps, kept)
        assert [lr_factor(step, steps, kept) for step in range(steps)] == [*whole, *[0.1] * 50][:steps]
    assert lr_factor(60, 150, config) > whole[60]  # without, the curve is made anew for the longer run


@given(
    name=st.sampled_from(sorted(set(SHAPES) - {"expression", "points"})),
    steps=st.integers(2, 300),
    planned=st.integers(0, 300),
    more=st.integers(1, 100),
)
def test_the_factor_of_an_extended_run_stays_where_it_ended(name, steps, planned, more):
    config = of_shape(name, planned_steps=planned, cycles=1)
    curve = curve_of(steps, config)
    own = [factor_on(curve, step, config) for step in range(steps + more)]
    assert own[:steps] == [lr_factor(step, steps, config) for step in range(steps)]
    assert set(own[steps:]) == {own[steps - 1]}


@pytest.mark.parametrize(
    ("steps", "fields", "sentence"),
    [
        (100, {"warmup_steps": 100}, "warmup_steps is 100, and the run has 100 steps"),
        (100, {"warmup_steps": 50, "planned_steps": 40}, "warmup_steps is 50, and planned_steps is 40"),
        (
            100,
            {"warmup_steps": 60, "warmup_unit": "percent", "planned_steps": 200},
            "is 60 percent, 120 steps, and the run",
        ),
        (100, {"planned_steps": 80}, "the curve ends at a learning rate of 0. Set min_lr_ratio"),
        (5, {"name": "rex_restarts", "cycles": 8}, "cycles is 8 .* in 5 steps after the warm-up some"),
        (9, {"name": "rex_restarts", "cycles": 100, "cycle_multiplier": 10}, "multiplier is 10: in 9 steps"),
        (9, {"name": "cosine_with_restarts", "cycles": 10}, "cycles is 10, more than the 9 steps after the warm-up"),
        (9, {"name": "cosine_soft_restarts", "cycles": 9, "warmup_steps": 1}, "more than the 8 steps"),
        (9, {"name": "expression", "expression": "1 / t"}, "has no value .float division by zero. at t = 0 and"),
        (10, {"name": "expression", "expression": "0.5 - t"}, "is -0.1, below 0 at t = 0.6 and step = 6"),
        (9, {"name": "expression", "expression": "exp(exp(8))"}, "has no value .math range error"),
        (9, {"name": "expression", "expression": "1e200 * 1e200"}, "is inf at t = 0"),
        (9, {"name": "expression", "expression": "t * 0"}, "is 0 at every step, so nothing is trained"),
        (9, {"name": "expression", "expression": "sin(t, 1)"}, "has no value .*sin.* takes exactly one argument"),
        (9, {"name": "expression", "expression": "sin"}, "has no value|cannot use"),
    ],
)
def test_a_curve_that_does_not_fit_the_run_is_refused(steps, fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_schedule(steps, SchedulerConfig(**fields))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot be read"),
        ("1 +", "cannot be read: invalid syntax"),
        ("lr * t", "cannot use 'lr'; it can use t, step, total"),
        ("__import__('os').getcwd()", "cannot use"),
        ("().__class__", "cannot use"),
        ("t.real", "cannot use 't.real'"),
        ("[t for t in (1,)][0]", "cannot use"),
        ("(lambda: 1)()", "cannot use"),
        ("'t' * 9", "cannot use \"'t'\""),
        ("t @ t", "cannot use"),
        ("1 << 9", "cannot use"),
        ("2j", "cannot use"),
        ("(x := 1)", "cannot use"),
        ("max(*[t, 1])", "cannot use"),
        ("log(x=t)", "cannot use 'log\\(x=t\\)'"),
        ("1e999", "larger than 1e300"),
        ("1+" * 200 + "t", "has 401 characters; shorten it to 300"),
        ("1\nimport os", "unprintable characters"),
    ],
)
def test_an_expression_of_anything_else_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_curve(SchedulerConfig(name="expression", expression=text))


def test_an_expression_may_use_all_its_words():
    text = "abs(floor(sin(t)) - ceil(cos(t))) * 0 + sqrt(4) // 2 % 2 * min(1, max(0, exp(-log(e)))) + tan(0) * -pi * "
    text += "(not 1 < t)"
    config = SchedulerConfig(name="expression", expression=text)
    assert lr_factor(3, 10, config) == pytest.approx(1 / math.e)
    both = SchedulerConfig(name="expression", expression="1 if 0 <= t < 0.5 and step != 2 or t == 0.9 else log(8, 2)")
    assert [lr_factor(step, 10, both) for step in (0, 2, 5, 9)] == pytest.approx([1, 3, 3, 1])


TERMS = st.recursive(
    st.sampled_from(["t", "step", "total", "0", "1", "0.1", "pi", "t < 0.5", "step == 3", "0 <= t < 1"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or", "+", "-", "*", "<", ">=", "!="]), inner).map(
            lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
        ),
        st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]}) if ({parts[1]}) else ({parts[2]})"),
        inner.map(lambda part: f"not ({part})"),
    ),
    max_leaves=8,
)


@given(text=TERMS.filter(lambda text: len(text) <= LONGEST), step=st.integers(0, 10))
@bounded(60)
def test_an_expression_has_the_value_that_python_gives_it(text, step):
    values = {"t": step / 10, "step": float(step), "total": 10.0}
    expected = float(eval(text, {"__builtins__": {}}, values | {"pi": math.pi}))
    assert read_expression(text, NAMES)(values) == expected, text


def test_and_and_or_choose_a_value_as_in_python():
    config = SchedulerConfig(name="expression", expression="t < 0.5 and 1 or 0.1")
    assert [lr_factor(step, 10, config) for step in (0, 4, 5, 9)] == [1, 1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "needs at least one point"),
        ("0:0, 1:0", "needs at least one point with a factor above 0"),
        ("0:1, 0.5", "points has '0.5'; write position:factor"),
        ("0:1, a:b", "points has 'a:b'"),
        ("0:1, 0.5:1, 0.4:0", "points has '0.4:0'; positions lie between 0 and 1, each after the one before"),
        ("0:1, 2:0", "positions lie between 0 and 1"),
        ("0:-1", "a factor must be 0 or more"),
        ("0:nan", "a factor must be 0 or more"),
        ("0:inf", "a factor must be 0 or more"),
        ("nan:1", "positions lie between"),
    ],
)
def test_points_that_make_no_curve_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_curve(SchedulerConfig(name="points", points=text))


@pytest.mark.parametrize(
    "fields",
    [{"d": 1.0}, {"gamma": 1.1}, {"cycles": 0}, {"power": 0.0}, {"warmup_unit": "percent", "warmup_steps": 100},
     {"decay_share": math.nan}, {"rise_share": 1.0}, {"planned_steps": -1}, {"cycle_multiplier": 11.0}],
    ids=str,
)  # fmt: skip
def test_numbers_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(set(fields) - {"warmup_unit"}))):
        SchedulerConfig(**fields)


PIECES = ["t", "step", "total", "pi", "1", "0.5", "1e300", "9" * 30, "(", ")", "+", "-", "*", "/", "//", "%", "**"]
PIECES += [
    " if ",
    " else ",
    " and ",
    " not ",
    "<",
    "==",
    "min(",
    "max(",
    "log(",
    "exp(",
    ",",
    "floor(",
    "1j",
    "'a'",
    "[",
]


@given(text=st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=20))
@bounded(20)
def test_any_expression_has_a_finite_value_or_is_refused(text):
    try:
        value = read_expression(text, NAMES)({"t": 0.5, "step": 5.0, "total": 10.0})
    except ValueError as problem:
        assert str(problem)
    else:
        assert math.isfinite(value)


@given(text=st.lists(st.sampled_from([*"0123456789:,;.-e \n", "nan", "inf", "1e999"]), max_size=30).map("".join))
@bounded(20)
def test_any_points_make_a_curve_or_are_refused(text):
    config = SchedulerConfig(name="points", points=text)
    try:
        check_curve(config)
    except ValueError as problem:
        assert "points" in str(problem)
    else:
        assert all(math.isfinite(lr_factor(step, 10, config)) for step in range(10))
