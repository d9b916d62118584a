"""A benchmark goes on where a peer warns: torch's compiler does of what it leaves unused."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")
