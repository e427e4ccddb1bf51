"""Small frozen layers with network layers beside them: LoRA with every option, and every other algorithm."""

from types import SimpleNamespace

import torch
from torch import nn

from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.lora_files.formats import group_tensors, layer_kind
from lora_atelier.trainer_core.networks import Network
from lora_atelier.trainer_core.networks.build import build_layer
from lora_atelier.trainer_core.networks.choose import TrainedLayer

# --- LoRA --------------------------------------------------------------------------------------------------

ALL_DROPOUTS = {"dropout": 0.2, "rank_dropout": 0.3, "module_dropout": 0.4}
OPTIONS = {
    "plain": {},
    "tucker": {"tucker": True},
    "dora": {"dora": True},
    "dora tucker": {"dora": True, "tucker": True},
    "scalar": {"use_scalar": True, "tucker": True},
    "rs": {"rs_lora": True},
    "pissa": {"init": "pissa"},
    "orthogonal": {"init": "orthogonal"},
    "svd_down": {"init": "svd_down"},
    "scaled channels": {"channel_scaling": True},
    "dora pissa": {"init": "pissa", "dora": True},
    "dropouts": ALL_DROPOUTS,
    "dora dropouts": {**ALL_DROPOUTS, "dora": True},
}
LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 4, 6)),
    "1x1": (lambda: nn.Conv2d(6, 5, 1), (3, 6, 4, 4)),
    "3x3 stride 2": (lambda: nn.Conv2d(6, 5, 3, stride=2, padding=1), (3, 6, 5, 5)),
    "1d": (lambda: nn.Conv1d(6, 5, 3, stride=2, padding=2, dilation=2), (3, 6, 9)),
    "3d": (lambda: nn.Conv3d(6, 5, (1, 2, 2), stride=(1, 2, 2), padding=(0, 1, 0)), (3, 6, 3, 4, 2)),
}


class Toy(nn.Module):
    """Every kind of layer in a row, (B, 4, 8, 8) to (B, 5)."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(down_block_types=("a",), layers_per_block=1, addition_embed_type=None)
        torch.manual_seed(0)
        self.conv_in = nn.Conv2d(4, 12, 3, padding=1)
        self.down = nn.Conv2d(12, 12, 3, stride=2, padding=1)
        self.small = nn.Conv2d(12, 8, 1)
        self.wide, self.out = nn.Linear(8, 20), nn.Linear(20, 5, bias=False)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.small(self.down(self.conv_in(x)).sin()).flatten(2).transpose(1, 2)
        return self.out(self.wide(x).sin().mean(1))


def config_of(**options):
    return LoraConfig(**{"rank": 4, "alpha": 2.0, "preset": "full", **options})


def move(module, std=0.1):
    """Let a network or layer be as if it had learned something."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data += std * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))


def one_layer(kind, dtype=torch.float64, by_output=False, **options):
    """Return (frozen layer, layer beside it, x), the layer as if it were attached."""
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    base = build().to(dtype).requires_grad_(False)
    made = build_layer(TrainedLayer("x", base, 4, 2.0), config_of(**options), 1, by_output=by_output).to(dtype)
    made.__dict__["frozen"] = base
    return base, made, torch.randn(shape, dtype=dtype)


# --- every other algorithm ---------------------------------------------------------------------------------

NAME = "lora_unet_to_k"
BASES = {  # 24 outputs, 16 inputs
    "linear": (lambda: nn.Linear(16, 24), (2, 3, 16)),
    "1x1": (lambda: nn.Conv2d(16, 24, 1), (2, 16, 4, 3)),
    "3x3": (lambda: nn.Conv2d(16, 24, 3, stride=2, padding=1), (2, 16, 5, 4)),
    "1d": (lambda: nn.Conv1d(16, 24, 3, stride=2, padding=2, dilation=2), (2, 16, 7)),
    "3d": (lambda: nn.Conv3d(16, 24, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 0)), (2, 16, 3, 4, 3)),
    "norm": (lambda: nn.GroupNorm(4, 16), (2, 16, 4, 3)),
}
CASES = {
    "loha thin": {"algorithm": "loha", "rank": 2},
    "loha": {"algorithm": "loha", "rank": 5},
    "loha tucker": {"algorithm": "loha", "rank": 5, "tucker": True},
    "loha scalar": {"algorithm": "loha", "rank": 2, "use_scalar": True},
    "lokr": {"algorithm": "lokr", "rank": 2},
    "lokr factor": {"algorithm": "lokr", "rank": 2, "factor": 2},
    "lokr both": {"algorithm": "lokr", "rank": 1, "decompose_both": True},
    "lokr full": {"algorithm": "lokr", "rank": 2, "full_matrix": True},
    "lokr left": {"algorithm": "lokr", "rank": 3, "decompose_both": True, "factor": 2},
    "lokr tucker": {"algorithm": "lokr", "rank": 1, "tucker": True},
    "lokr scalar": {"algorithm": "lokr", "rank": 2, "use_scalar": True},
    "glora": {"algorithm": "glora", "rank": 3},
    "glora scalar": {"algorithm": "glora", "rank": 3, "use_scalar": True},
    "oft": {"algorithm": "oft", "rank": 4},
    "oft held": {"algorithm": "oft", "rank": 4, "constraint": 0.01},
    "boft": {"algorithm": "boft", "rank": 6},
    "boft held": {"algorithm": "boft", "rank": 6, "constraint": 0.01},
    "ia3": {"algorithm": "ia3"},
    "ia3 input": {"algorithm": "ia3"},
    "full": {"algorithm": "full"},
    "loha dora": {"algorithm": "loha", "rank": 2, "dora": True},
    "lokr dora": {"algorithm": "lokr", "rank": 2, "dora": True},
    "loha dora output": {"algorithm": "loha", "rank": 2, "dora": True},
    "lokr dora output": {"algorithm": "lokr", "rank": 2, "dora": True},
}
TABLE = [(case, base) for case in CASES for base in BASES if base != "norm"] + [("full", "norm")]


def attached(case, base, dtype=torch.float32, filled=True):
    """Return a frozen layer with a network layer beside it, filled with something, and an input."""
    build, shape = BASES[base]
    torch.manual_seed(0)
    module = build().to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    name = "lora_unet_ff_net_2" if case == "ia3 input" else NAME
    config = LoraConfig(**{"rank": 4, "alpha": 6.0, **CASES[case]})
    by_output = case.endswith("dora output")
    trained = TrainedLayer(name, module, config.rank, config.alpha)
    network = Network([trained], config, seed=0)
    layer = build_layer(trained, config, seed=0, by_output=by_output)
    if filled:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.4) if parameter.ndim else nn.init.constant_(parameter, 0.7)
    layer = layer.double() if dtype == torch.float64 else layer
    network.attach()
    beside(module, layer)
    return module, layer, torch.randn(shape, dtype=dtype)


def beside(module, layer):
    """Put a network layer beside a frozen layer in the place of the one that is there."""
    module.__dict__["delta"] = layer
    layer.__dict__["frozen"] = module
    return module


def file_parts(layer):
    """Return a layer's tensors as reading the file gives them: the parts and alpha."""
    tensors = {f"{NAME}.{k}": t for k, t in (layer.tensors() | layer.magnitude_tensors()).items()}
    grouped, unknown = group_tensors(tensors)
    assert not unknown and list(grouped) == [NAME]
    parts = {part: tensors[name] for part, name in grouped[NAME].items()}
    assert layer_kind(parts)
    return parts, float(parts.pop("alpha", 0))
