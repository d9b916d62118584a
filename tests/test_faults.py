"""The planted faults of tests/faults.py can be planted."""

from pathlib import Path

import pytest
from faults import FAULTS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("file", sorted({file for file, _ in FAULTS}))
def test_faults_have_their_places(file):
    source = (ROOT / file).read_text()
    places = [text for (name, _), faults in FAULTS.items() if name == file for text, _ in faults]
    assert [text for text in places if source.count(text) != 1] == []
