"""The notebook of examples/ runs, and is stored without outputs."""

import json
import sys
import types
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def test_the_tour_runs(monkeypatch, capsys):
    """Its cells in order, in one namespace; a stand-in shows the picture."""
    pytest.importorskip("matplotlib")
    shown = []
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.version_info = (9, 0)  # which matplotlib asks for
    display.Image = shown.append
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names = {"__name__": "tour"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    assert "served by" in capsys.readouterr().out
    assert names["losses"][-1] < names["losses"][0] / 3
    assert [x[:4] for x in shown] == [b"\x89PNG"]
