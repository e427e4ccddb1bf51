"""A guide of the loss is named in few files of the core: others ask its term."""

import re
from pathlib import Path

import pytest

from lora_atelier.trainer_core.objective import Term

CORE = Path(__file__).resolve().parents[3] / "trainer_core"
FOREIGN = CORE / "workflow" / "foreign"  # reads and writes the words of other programs
MOST = 5  # files

NAMES = {  # how the core speaks of each: its term, its settings, and what follows from these
    "MaskedPrior": r"MaskedPrior|\bprior_weight\b|(?i:masked prior)",
    "PriorPrediction": r"PriorPrediction|prior_prediction|keeps_prediction|(?i:prior prediction)",
    "Preservation": r"(?i:preservation)",
    "GuidanceLoss": r"GuidanceLoss|guidance_loss",
    "PromptSlider": r"PromptSlider|\.slider\b|slider_(positive|negative|keep|strength)",
    "PairSlider": r"PairSlider|(?i:\bpaired\b)|other_end|\bother end\b",
    "Uncertainty": r"(?i:uncertainty)",
    "DifferentialGuidance": r"DifferentialGuidance|differential_guidance",
}


def test_each_guide_has_its_words() -> None:
    rooms = Term.__module__.removesuffix("term")
    assert {kind.__name__ for kind in Term.__subclasses__() if kind.__module__.startswith(rooms)} == {*NAMES}


@pytest.mark.parametrize("guide", NAMES)
def test_few_files_name_a_guide(guide: str) -> None:
    files = [path for path in CORE.rglob("*.py") if FOREIGN not in path.parents]
    found = [str(path.relative_to(CORE)) for path in files if re.search(NAMES[guide], path.read_text(encoding="utf-8"))]
    own = [name for name in found if name.startswith("objective/terms/")]
    assert own and any(name.startswith("config/") for name in found)
    assert len(found) <= MOST, f"{guide} is named in {found}; let its term answer what they ask"
