"""Pictures of attention: what stands where; other scripts, long sentences, heads, spans."""

import warnings

import pytest
import torch

from attnfast import Span
from attnfast.analysis import plots
from attnfast.ops.span import to_dense

font_manager = pytest.importorskip("matplotlib.font_manager")


@pytest.fixture
def drawn(monkeypatch):
    """Draw an alignment; return the maps of the figure in place of its bytes."""
    figures, png = [], plots._png

    def keep(figure):
        figures.append(figure)
        return png(figure)

    monkeypatch.setattr(plots, "_png", keep)

    def call(*args, **options):
        assert plots.draw_alignment(*args, **options).startswith(b"\x89PNG")
        return [axes for axes in figures.pop().axes if axes.images]

    return call


def texts(axis):
    return [x.get_text() for x in axis.get_ticklabels()]


def test_words_stand_at_their_rows_and_columns(drawn):
    weights = torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.5, 0.5]], requires_grad=True)
    (axes,) = drawn(weights, ["a", "$b$", "c"], ["x", "y"])
    assert texts(axes.xaxis) == ["a", r"\$b\$", "c"] and texts(axes.yaxis) == ["x", "y"]
    assert axes.images[0].get_array().tolist() == weights.tolist()
    assert axes.images[0].get_clim() == (0, 1)


def test_a_map_for_each_head(drawn):
    weights = torch.rand(5, 3, 4).bfloat16()
    maps = drawn(weights, list("abcd"), list("xyz"))
    assert [x.get_title() for x in maps] == [f"head {i}" for i in range(1, 6)]
    for axes, head in zip(maps, weights):
        assert axes.images[0].get_array().tolist() == head.float().tolist()


def test_long_sentences_label_some_words(drawn):
    source, target = [f"s{i}" for i in range(130)], [f"t{i}" for i in range(41)]
    (axes,) = drawn(torch.rand(41, 130), source, target)
    assert texts(axes.xaxis) == source[::4] and texts(axes.yaxis) == target[::2]
    width, height = axes.figure.get_size_inches()
    assert max(width, height) <= plots.MOST_INCHES


def test_columns_of_a_span_stand_at_their_keys(drawn):
    keys = Span(window=1).key_indices(4, 5)
    weights = torch.rand(4, 3)
    (axes,) = drawn(weights, list("abcde"), list("wxyz"), key_indices=keys)
    assert axes.images[0].get_array().tolist() == to_dense(weights, keys, 5).tolist()


def test_other_scripts(drawn, monkeypatch):
    """Letters of the usual font make no noise; those that no font has are named once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn(torch.eye(3), ["Ελλάς", "Привет", "שלום"], ["ä", "ß", "é"])
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    with pytest.warns(UserWarning, match="no font of this machine has 日本") as told:
        drawn(torch.eye(2), ["日本", "本"], ["a", "b"])
    assert len(told) == 1


def test_a_letter_of_another_font():
    manager, ft2font = font_manager, pytest.importorskip("matplotlib.ft2font")
    usual = ft2font.FT2Font(manager.findfont(manager.FontProperties())).get_charmap()
    for entry in manager.fontManager.ttflist:
        letters = ft2font.FT2Font(entry.fname).get_charmap().keys() - usual.keys()
        letter = next((chr(x) for x in sorted(letters) if chr(x).isprintable()), None)
        if letter and "Last Resort" not in entry.name:
            break
    else:
        pytest.skip("no other font has other letters")
    found = plots._fonts_for([f"a{letter}"])
    assert len(found) == 2
    assert plots._fonts_for(["a"]) == found[:1]
