"""What is shown while work is done: a bar to those who watch, lines to a log."""

import io
import sys

import pytest

from attnfast._utils import progress
from attnfast._utils.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(Terminal):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def work(clock, seconds, **options):
    with Progress("epoch 2 of 6", 100, "step", **options) as bar:
        for n in range(50):
            clock[0] += seconds
            bar(1, f"loss {n / 10:.3f}")


def test_a_log_has_a_plain_line_every_minute(clock, capsys):
    work(clock, 3, done=10)
    assert capsys.readouterr().err.splitlines() == [
        "attnfast: epoch 2 of 6: step 30 of 100, loss 1.900, 0.333 a second, 0:03:30 left",
        "attnfast: epoch 2 of 6: step 50 of 100, loss 3.900, 0.333 a second, 0:02:30 left",
    ]
    lines = []
    work(clock, 600, report=lines.append)
    assert len(lines) == 50
    assert lines[-1] == ("epoch 2 of 6: step 50 of 100, loss 4.900, 0.00167 a second, 8:20:00 left")
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(clock, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(clock, 100)
    shown = sys.stderr.getvalue()
    assert "epoch 2 of 6" in shown and "/100" in shown and "attnfast:" not in shown
    assert shown.endswith("\r"), "the bar is wiped away"


def test_a_terminal_without_tqdm_has_lines(clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(clock, 30)
    assert sys.stderr.getvalue().count("attnfast: epoch 2 of 6: step ") == 25


@pytest.mark.parametrize("stderr", [None, Gone()])
def test_work_goes_on_where_nothing_can_be_shown(clock, monkeypatch, stderr, capsys):
    monkeypatch.setattr(sys, "stderr", stderr)
    work(clock, 60)
    progress.log("one")
    assert capsys.readouterr().out == ""


def test_a_notebook_has_a_bar(tmp_path):
    """In a kernel, without widgets: text, and no warning."""
    pytest.importorskip("tqdm")
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from attnfast._utils.progress import Progress\n"
        "with Progress('epoch 2 of 6', 3, 'step') as bar:\n"
        "    bar(3)\n"
    )
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(page, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = "".join(x["text"] for x in page.cells[0].outputs)
    assert "epoch 2 of 6" in shown and "/3" in shown
    assert "attnfast:" not in shown and "Warning" not in shown
