"""Pytest plugin: property tests end with the first failing example, without shrinking it. That would take
minutes, and does not change whether a test fails."""

from hypothesis import Phase, settings


def pytest_collection() -> None:
    """Run before the test files are imported, and after the settings that all tests share."""
    settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
