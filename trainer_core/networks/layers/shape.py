"""What kind of layer a module is, and the shape of its weight, also where the weight is quantized or not in memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Matrix = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d  # what networks change, beside norms


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer of one real weight; other programs' quantized ones are no nn.Linear."""
    if is_complex(module):
        return False
    if isinstance(module, nn.Linear):
        return True
    sides = (getattr(module, name, None) for name in ("in_features", "out_features"))
    weight = getattr(module, "weight", None)
    one = weight is None or (isinstance(weight, Tensor) and weight.ndim <= 2)
    return one and all(isinstance(side, int) for side in sides) and not any(True for _ in module.children())


def is_complex(module: nn.Module) -> bool:
    """Tell whether a module's weight has complex numbers, which no LoRA has."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.is_complex()


def is_matrix(module: nn.Module) -> bool:
    """Tell whether a module is linear, or a plain convolution along any number of axes: what networks change."""
    if isinstance(module, CONVOLUTIONS):
        return module.groups == 1 and module.padding_mode == "zeros" and not is_complex(module)
    return is_linear(module)


def is_spatial(module: Any) -> bool:
    """Tell whether a module is a convolution whose kernel is larger than 1 along any axis."""
    return isinstance(module, CONVOLUTIONS) and max(module.kernel_size) > 1


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a norm that networks change."""
    return isinstance(module, nn.GroupNorm | nn.LayerNorm)


def geometry_of(module: nn.Module) -> dict[str, Any]:
    """Collect how a convolution moves over its input, as `convolve` takes it; {} for other layers."""
    if not isinstance(module, CONVOLUTIONS):
        return {}
    return {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}


def weight_shape(module: Any) -> tuple[int, ...]:
    """The shape of a module's weight, which its stored bytes may not have."""
    if is_linear(module):
        return module.out_features, module.in_features
    if isinstance(module, CONVOLUTIONS):
        return module.out_channels, module.in_channels // module.groups, *module.kernel_size
    return tuple(module.weight.shape)
