"""A plugin of pytest: property tests end with the first example that fails, which is not made smaller. That
would take minutes, and whether a test fails does not depend on it."""

from hypothesis import Phase, settings


def pytest_collection() -> None:
    """Before the test files are imported, and after the settings that all tests share."""
    settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
