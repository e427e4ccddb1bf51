"""The table of optimizers: the class, parameters and defaults of each, and when to use it. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .rows import Row


class Optimizer(NamedTuple):
    """One optimizer: its class, its own parameters, and when to use it."""

    path: str  # library and class; empty: the user names it
    package: str  # its name for pip
    settings: tuple[Row, ...]
    learning_rate: float  # a good start for a LoRA
    when: str  # one or two sentences for the user
    wanted: str = ""  # oldest version that works, "4.0"; empty: any
    instead: str = "adamw"  # the optimizer to suggest where this one is unavailable
    estimates: bool = False  # it estimates its step size d; learning rates multiply it
    averages: bool = False  # schedule-free: the weights to use are an average of the trained ones
    fixed: Mapping[str, Any] = MappingProxyType({})  # arguments without an input in the node
    in_8bit: int = 0  # values of state for each weight, where these have 8 bits
    in_32bit: int = 0  # values of state for each weight of a matrix, where it takes long to find them by a step
    pages: bool = False  # its state may move to RAM, which needs an NVIDIA GPU
    own_beta1: bool = False  # its class takes beta1 by that name, None for 0, and no tuple of betas
    lays_out: bool = False  # its state has an order in memory that a file does not keep
    rest: str = ""  # it trains matrices alone, and this optimizer all other weights


DECAY = "How strongly weights are pulled towards 0, as a share of the learning rate. 0 = not."
INTO_GRADIENT = "How strongly weights are pulled towards 0: this share of each is added to its gradient. 0 = not."


def _own(name: str, default: bool | int | float | str, words: str, low: float = 0.0, high: float = math.inf) -> Row:
    """Describe a parameter; default: good for a LoRA, and of the parameter's type."""
    more: dict[str, Any] = {"low": low, "high": high} if not isinstance(default, bool | str) else {}
    if isinstance(default, float):
        step = min(0.001, default) if default > 0 else 0.001
        more |= {"step": step, "round": min(1e-6, step / 1e4)}
    more["advanced"] = not isinstance(default, str)
    return Row(name=name, kind=type(default), default=default, words=words, **more)


def _decay(default: float, words: str = DECAY) -> Row:
    return _own("weight_decay", default, words, high=100)


def _betas(beta1: float, beta2: float, least: float = 0.0) -> tuple[Row, Row]:
    mean = f"Memory of the mean gradient, {least:g} to 0.999999. {beta1:g} averages about {1 / (1 - beta1):.0f} steps."
    square = (
        f"Memory of the mean squared gradient, 0 to 0.999999. {beta2:g} averages about {1 / (1 - beta2):.0f} steps."
    )
    return _own("beta1", beta1, mean, least, 0.999999), _own("beta2", beta2, square, 0, 0.999999)


def _eps(default: float, low: float = 0.0) -> Row:
    text = f"Added to the divisor so that tiny gradients do not make huge steps. {default:g} is usual."
    return _own("eps", default, text, low, 1)


ADAM = (_decay(0.01), *_betas(0.9, 0.999), _eps(1e-8))
LION = (
    _decay(0.05),
    _own(
        "beta1", 0.9, "Share of the running mean in the direction of a step, 0 to 0.999999. 0.9 is usual.", 0, 0.999999
    ),
    _own("beta2", 0.99, "Memory of the running mean of gradients, 0 to 0.999999. 0.99 is usual.", 0, 0.999999),
)
D0 = _own("d0", 1e-6, "First guess of the step size, which only ever grows. 1e-6 is usual; smaller is safe.", 1e-12, 1)
D_COEF = _own("d_coef", 1.0, "Multiplies the estimated step size; 0.5 to 2 to learn more slowly or faster.", 0.001, 100)
SEPARATE = (
    "A step size is estimated for the UNet and for each text encoder by itself. Off: parts with the same learning "
    "rate share one estimate."
)
ADEMAMIX = (
    _decay(0.01),
    *_betas(0.9, 0.999),
    _own("beta3", 0.9999, "Memory of the slow mean gradient, 0 to 0.999999. 0.9999 is usual.", 0, 0.999999),
    _own("alpha", 5.0, "Share of the slow mean in a step, 0 to 1000. 5 is usual; 0 = AdamW.", 0, 1000),
    _eps(1e-8),
)
CLIP = _own("clip_threshold", 1.0, "Longest root mean square of an update, above 0. 1 is usual.", 0.001, 1000)

OPTIMIZERS: dict[str, Optimizer] = {
    # torch's own, fused: one kernel for all weights.
    "adamw": Optimizer(
        "torch.optim.AdamW",
        "torch",
        ADAM,
        1e-4,
        "adamw runs everywhere and is a good first choice.",
        fixed={"fused": True},
    ),
    # bitsandbytes is the only one with kernels for 8-bit state.
    "adamw8bit": Optimizer(
        "bitsandbytes.optim.AdamW8bit",
        "bitsandbytes",
        ADAM,
        1e-4,
        "AdamW with its state in 8 bits: a quarter of its memory. If it cannot run here, use adamw, or lion, which "
        "needs half of the state.",
        wanted="0.45",
        in_8bit=2,
    ),
    "paged_adamw8bit": Optimizer(
        "bitsandbytes.optim.PagedAdamW8bit",
        "bitsandbytes",
        ADAM,
        1e-4,
        "AdamW 8-bit whose state may move to RAM when the GPU's memory is full. NVIDIA GPUs only.",
        wanted="0.45",
        instead="adamw8bit",
        in_8bit=2,
        pages=True,
    ),
    # Its LAMB8bit and LARS8bit are left out: with state in 8 bits they are its Adam and SGD, and limit no step. Its
    # Adam8bit is AdamW8bit with another default for weight_decay. Paged optimizers need CUDA, the others nothing.
    "ademamix8bit": Optimizer(
        "bitsandbytes.optim.AdEMAMix8bit",
        "bitsandbytes",
        ADEMAMIX,
        1e-4,
        "AdamW with a second, slow mean of gradients that remembers old pictures, its state in 8 bits. For long runs; "
        "settings as AdamW's.",
        wanted="0.45",
        in_8bit=3,
    ),
    "paged_ademamix8bit": Optimizer(
        "bitsandbytes.optim.PagedAdEMAMix8bit",
        "bitsandbytes",
        ADEMAMIX,
        1e-4,
        "AdEMAMix 8-bit whose state may move to RAM. NVIDIA GPUs only.",
        wanted="0.45",
        instead="ademamix8bit",
        in_8bit=3,
        pages=True,
    ),
    # From transformers, which is needed anyway; sd-scripts uses the same class, so its settings mean the same.
    "adafactor": Optimizer(
        "transformers.optimization.Adafactor",
        "transformers",
        (
            _decay(0.0),
            _own("beta1", 0.0, "Memory of the mean update, 0 to 0.999999. 0 = none, which saves memory.", 0, 0.999999),
            CLIP,
            _own("decay_rate", -0.8, "How fast the memory of squared gradients grows with the steps, -1 to 0.", -1, 0),
            _own("scale_parameter", False, "Steps are in proportion to the size of the weights. Off suits LoRAs."),
            _own(
                "relative_step",
                False,
                "The learning rate follows from the number of steps (1 / sqrt(step), at most 0.01): those set here "
                "only say what learns (0 = not), and the schedule has to be constant.",
            ),
            _own("warmup_init", False, "With relative_step: starts with very small steps that grow."),
        ),
        1e-4,
        "Little memory: one number for each row and column. With a constant schedule, best after a warm-up.",
        own_beta1=True,
    ),
    # pytorch-optimizer keeps these four current and tested; their papers' repositories are not on PyPI or not kept.
    "came": Optimizer(
        "pytorch_optimizer.CAME",
        "pytorch-optimizer",
        (
            _decay(0.01),
            *_betas(0.9, 0.999),
            _own("beta3", 0.9999, "Memory of how sure updates are, 0 to 0.999999. 0.9999 is usual.", 0, 0.999999),
            CLIP,
        ),
        1e-4,
        "As sparing as Adafactor, with steps held back where they are unsure. Goes well with a REX schedule.",
        wanted="4.0",
        instead="adafactor",
    ),
    # The authors' package: it alone keeps a slice of each weight (slice_p), which halves the memory.
    "prodigy": Optimizer(
        "prodigyopt.Prodigy",
        "prodigyopt",
        (
            *ADAM[:3],
            _eps(1e-8, 1e-30),
            D0,
            D_COEF,
            _own("use_bias_correction", True, "The first steps are as large as AdamW's. Off, they are larger."),
            _own(
                "safeguard_warmup",
                True,
                "Turn it on if the schedule has a warm-up, which would otherwise raise the estimate.",
            ),
            _own("slice_p", 11, "The estimate looks at every n-th weight: 11 saves memory, 1 looks at all.", 1, 1000),
            _own("separate", False, SEPARATE),
        ),
        1.0,
        "Finds its step size by itself. learning_rate is 1 for everything that learns (a factor on what it finds, 0 = "
        "not); no schedule with restarts; a batch of 2 or more helps.",
        wanted="1.1",
        estimates=True,
    ),
    "prodigy_plus_schedule_free": Optimizer(
        "prodigyplus.ProdigyPlusScheduleFree",
        "prodigy-plus-schedule-free",
        (
            _decay(0.0),
            *_betas(0.9, 0.99, 0.001),
            _eps(1e-8, 1e-30),
            D0,
            D_COEF,
            _own(
                "prodigy_steps",
                0,
                "The step size stays as it is from this step on. 0 = it is estimated to the end.",
                0,
                1e9,
            ),
            _own("use_speed", False, "Another estimate of the step size, which reacts less to weight decay."),
            _own("use_bias_correction", False, "Starts as RAdam does, with small steps."),
            _own("use_stableadamw", True, "Limits each update's root mean square; then max_grad_norm can be 0."),
            _own("factored", True, "One number for each row and column in place of every weight's: less memory."),
            _own("separate", True, SEPARATE),
        ),
        1.0,
        "Prodigy without a schedule: it averages instead. learning_rate is 1 for everything that learns (0 = not); "
        "constant schedule only.",
        wanted="2.0",
        instead="prodigy",
        estimates=True,
        averages=True,
        # It would split by group, while we split by rate and model; its rounding would use torch's global generator.
        fixed={"split_groups": False, "stochastic_rounding": False},
    ),
    # The authors' package, where the method is developed.
    "schedulefree_adamw": Optimizer(
        "schedulefree.AdamWScheduleFree",
        "schedulefree",
        (_decay(0.01), *_betas(0.9, 0.999, 0.001), _eps(1e-8)),
        3e-4,
        "AdamW that averages in place of a schedule, so the run may end at any time. Constant schedule only (with a "
        "warm-up if wanted); a learning rate of 1 to 10 times AdamW's.",
        wanted="1.2",
        averages=True,
    ),
    "lion": Optimizer(
        "pytorch_optimizer.Lion",
        "pytorch-optimizer",
        LION,
        2e-5,
        "Only the sign of the mean gradient counts: half of AdamW's state. A learning rate of a fifth to a tenth of "
        "AdamW's, weight decay three to ten times.",
        wanted="4.0",
    ),
    "lion8bit": Optimizer(
        "bitsandbytes.optim.Lion8bit",
        "bitsandbytes",
        LION,
        2e-5,
        "Lion with its state in 8 bits: an eighth of AdamW's. If it is not available, use lion.",
        wanted="0.45",
        instead="lion",
        in_8bit=1,
    ),
    "paged_lion8bit": Optimizer(
        "bitsandbytes.optim.PagedLion8bit",
        "bitsandbytes",
        LION,
        2e-5,
        "Lion 8-bit whose state may move to RAM. NVIDIA GPUs only.",
        wanted="0.45",
        instead="lion8bit",
        in_8bit=1,
        pages=True,
    ),
    "adopt": Optimizer(
        "pytorch_optimizer.ADOPT",
        "pytorch-optimizer",
        (_decay(0.01), *_betas(0.9, 0.9999), _eps(1e-6)),
        1e-4,
        "Adam that converges whatever beta2 is: the step is divided by what was known before it. Settings as AdamW's.",
        wanted="4.0",
        fixed={"weight_decouple": True},  # weight_decay is decoupled, as its words say
    ),
    "sgd": Optimizer(
        "torch.optim.SGD",
        "torch",
        (
            _decay(0.0, INTO_GRADIENT),
            _own("momentum", 0.9, "Memory of earlier steps, 0 to 0.999999. 0 = none and no state.", 0, 0.999999),
            _own("nesterov", True, "Looks one step ahead; needs momentum."),
        ),
        0.1,
        "Plain gradient descent with momentum. Steps are as long as gradients, so the learning rate must be found by "
        "trial, and is far larger than AdamW's.",
    ),
    "rmsprop": Optimizer(
        "torch.optim.RMSprop",
        "torch",
        (
            _decay(0.0, INTO_GRADIENT),
            _own("alpha", 0.99, "Memory of the mean squared gradient, 0 to 0.999999. 0.99 is usual.", 0, 0.999999),
            _eps(1e-8),
            _own("momentum", 0.0, "Memory of earlier steps, 0 to 0.999999. 0 = none.", 0, 0.999999),
            _own("centered", False, "Divides by the spread of the gradient around its mean."),
        ),
        1e-4,
        "Adam without the mean of gradients: quick to turn, half the state.",
    ),
    # The parameters that bitsandbytes' kernels use; nesterov, RMSprop's momentum and others are read there and ignored.
    "sgd8bit": Optimizer(
        "bitsandbytes.optim.SGD8bit",
        "bitsandbytes",
        (
            _decay(0.0, INTO_GRADIENT),
            _own("momentum", 0.9, "Memory of earlier steps, 0.001 to 0.999999. 0.9 is usual.", 0.001, 0.999999),
        ),
        0.1,
        "SGD with its momentum in 8 bits. The learning rate must be found by trial.",
        wanted="0.45",
        instead="sgd",
        in_8bit=1,
    ),
    "rmsprop8bit": Optimizer(
        "bitsandbytes.optim.RMSprop8bit",
        "bitsandbytes",
        (
            _decay(0.0, INTO_GRADIENT),
            _own(
                "alpha", 0.99, "Memory of the mean squared gradient, 0.001 to 0.999999. 0.99 is usual.", 0.001, 0.999999
            ),
            _eps(1e-8),
        ),
        1e-4,
        "RMSprop with its state in 8 bits.",
        wanted="0.45",
        instead="rmsprop",
        in_8bit=1,
    ),
    "adagrad8bit": Optimizer(
        "bitsandbytes.optim.Adagrad8bit",
        "bitsandbytes",
        (_decay(0.0, INTO_GRADIENT), _eps(1e-10)),
        1e-3,
        "Steps that shrink with the sum of all squared gradients, its state in 8 bits. Best with a constant schedule.",
        wanted="0.45",
        instead="adamw8bit",
        in_8bit=1,
    ),
    "radam": Optimizer(
        "torch.optim.RAdam",
        "torch",
        ADAM,
        1e-4,
        "AdamW that warms up by itself, for runs without a warm-up.",
        fixed={"decoupled_weight_decay": True},
    ),
    # torch's own.
    "muon": Optimizer(
        "torch.optim.Muon",
        "torch",
        (
            _decay(0.01),
            _own("momentum", 0.95, "Memory of earlier gradients, 0 to 0.999999. 0.95 is usual.", 0, 0.999999),
            _own("nesterov", True, "Looks one step ahead; needs momentum."),
            _own("ns_steps", 5, "Rounds that even out each step's directions. 5 is usual.", 1, 20),
        ),
        1e-4,
        "Steps that go equally far in all directions of a matrix, with half of AdamW's state. Other weights, such as "
        "those of convolutions, are trained by AdamW. Settings as AdamW's.",
        wanted="2.9",
        fixed={"adjust_lr_fn": "match_rms_adamw"},  # steps as long as AdamW's, so that its learning rates suit
        in_32bit=1,
        rest="adamw",
    ),
    "soap": Optimizer(
        "pytorch_optimizer.SOAP",
        "pytorch-optimizer",
        (
            _decay(0.01),
            *_betas(0.95, 0.95),
            _eps(1e-8),
            _own(
                "precondition_frequency",
                10,
                "Steps between two looks at the directions, 1 to 10000. 10 is usual; more is faster.",
                1,
                10_000,
            ),
            _own(
                "max_precondition_dim",
                256,
                "Longest side of a matrix that is turned, 1 to 10000. A side of n takes 2 n^2 numbers of memory, so "
                "256 turns the ranks and small layers alone.",
                1,
                10_000,
            ),
        ),
        1e-4,
        "AdamW along the main directions of each matrix's gradients. AdamW's state and a little more; a step takes "
        "longer. Settings as AdamW's; its first step only looks.",
        wanted="4.0",
        lays_out=True,
    ),
    # Its authors' class is part of ai-toolkit, and steps inside of the backward pass, past clipping and accumulation.
    "automagic": Optimizer(
        "atelier.Automagic",
        "torch",
        (
            _decay(0.0),
            _own("beta2", 0.999, "Memory of the mean squared gradient, 0 to 0.999999. 0.999 is usual.", 0, 0.999999),
            CLIP,
            _own(
                "history",
                4,
                "Updates of a weight that vote, 2 to 8: the same sign raises the rate, one that alternates lowers it. "
                "4 is usual; more is surer and slower.",
                2,
                8,
            ),
        ),
        1e-4,
        "Finds its learning rate from the one that is set: up while weights keep their direction, down where they jump "
        "to and fro. About one byte of state for each weight. Best with a constant schedule.",
    ),
    "custom": Optimizer(
        "",
        "pytorch-optimizer",
        (
            _own(
                "optimizer",
                "AdEMAMix",
                "Class of an optimizer: AdEMAMix, say, or with its library pytorch_optimizer.AdEMAMix. Libraries: "
                "torch.optim, pytorch_optimizer, prodigyopt, prodigyplus, schedulefree, transformers.optimization, "
                "bitsandbytes.optim, lion_pytorch, dadaptation, atelier.",
            ),
            _own(
                "arguments",
                "",
                "Its parameters as name=value, …, for example betas=(0.9, 0.999, 0.9999), weight_decay=0.01. Those "
                "left out have the library's defaults.",
            ),
        ),
        1e-4,
        "Any other optimizer by name, tried on a few numbers before the run.",
    ),
}
