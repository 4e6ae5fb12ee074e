"""Files of the second ring are not imported where its tests are deselected: less to collect for each worker."""

from pathlib import Path

import pytest

SECOND = "\npytestmark = pytest.mark.second\n"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    skipped = "not second" in config.getoption("markexpr") and collection_path.suffix == ".py"
    return True if skipped and SECOND in collection_path.read_text() else None
