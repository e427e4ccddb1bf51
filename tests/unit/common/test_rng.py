"""Random draws depend on their name alone."""

import torch

from lora_atelier.trainer_core.common.rng import generator, sample_uniform


def test_the_same_name_draws_the_same_numbers() -> None:
    first = torch.randn(8, generator=generator(3, "noise", 5, 1))
    torch.manual_seed(99)  # the global generator has no say
    assert torch.equal(first, torch.randn(8, generator=generator(3, "noise", 5, 1)))


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    sample_uniform(0, "flip", 4)
    assert torch.equal(torch.rand(1), expected)


def test_every_part_of_the_name_counts() -> None:
    names = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1), (0, "a", 1, 0), (0, "a", 10)]
    assert len({sample_uniform(*name) for name in names}) == len(names)


def test_neighbouring_indices_are_unrelated_and_uniform() -> None:
    draws = torch.tensor([sample_uniform(7, "flip", i) for i in range(4000)])
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(draws.std() - 12**-0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]) < 0.05


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert sample_uniform(5, "x") == sample_uniform(5 + 2**64, "x")
    assert 0 <= sample_uniform(2**64 - 1, "x") < 1


def test_the_numbers_stay_what_they_are_across_versions() -> None:
    """A resumed or repeated run depends on these very values."""
    assert generator(0, "order", 0).initial_seed() == 3_471_081_512_423_777_433
    assert sample_uniform(0, "flip", 1, 2) == 0.15998546020247695
