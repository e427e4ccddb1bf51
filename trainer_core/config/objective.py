"""What is predicted and how errors weigh."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Config, check_choices, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Config):
    """What is predicted and how errors weigh."""

    min_snr_gamma: float = 0.0  # 0 = every timestep weighs the same; 5 is usual
    noise_offset: float = 0.0  # 0.03..0.1 lets very dark and very bright pictures be learned
    min_timestep: int = 0  # 0..999
    max_timestep: int = 999

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "min_snr_gamma", 0)
        check_range(self, "noise_offset", 0)
        check_range(self, "min_timestep", 0, 999)
        check_range(self, "max_timestep", 0, 999)
        if self.min_timestep > self.max_timestep:
            raise ValueError(f"min_timestep {self.min_timestep} is above max_timestep {self.max_timestep}.")
