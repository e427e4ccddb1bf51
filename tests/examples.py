"""How many examples a property is tried with: a third in every run, all with --thorough, as tests/conftest.py says."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Try a property with so many examples, as hypothesis' own `settings`; a third of them without --thorough."""
    return settings(max_examples=max(10, count * settings.default.max_examples // 100))
