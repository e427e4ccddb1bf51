"""What the tests here share."""

from encoded_once import encoded_once  # noqa: F401 (a fixture)
