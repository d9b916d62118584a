"""Pictures, drawn in memory: every function returns the bytes of a PNG file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from torch import Tensor

from attnfast.errors import optional
from attnfast.measure import Cost

COLOURS = {
    "none": "#8a8f98",
    "eager": "#d1495b",
    "torch.compile": "#edae49",
    "fused": "#00798c",
    "attnfast": "#00798c",
}


def _figure(width: float, height: float):
    return optional("matplotlib.figure", "drawing").Figure((width, height), layout="constrained")


def _png(figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def draw_alignment(weights: Tensor, source: Sequence[str], target: Sequence[str]) -> bytes:
    """Draw a heatmap of ``weights [T, Tk]``: a row for each target word, a column for each source.

    Args:
        source, target: Tk and T words.
    """
    figure = _figure(2.2 + 0.42 * len(source), 1.7 + 0.36 * len(target))
    axes = figure.add_subplot()
    image = axes.imshow(weights.float().numpy(), cmap="GnBu", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(target)), target)
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
    axes.set_xticks([i - 0.5 for i in range(1, len(source))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(target))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0, top=False)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source: what is read", labelpad=8)
    axes.set_ylabel("target: what is written", labelpad=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.03, label="attention weight")
    bar.outline.set_visible(False)
    return _png(figure)


def draw_speed(
    rows: Mapping[str, Mapping[str, Sequence[Cost]]],
    sizes: Sequence[int],
    note: str,
    axis: str = "words in the source and in the target",
) -> bytes:
    """Draw time and memory over a size, a row of two charts for each entry.

    Args:
        rows: by title, then by the name of a curve, a cost for each of ``sizes``.
        note: what was measured, above all charts.
        axis: what the sizes are.
    """
    ticker = optional("matplotlib.ticker", "drawing")
    figure = _figure(10, 3.5 * len(rows) + 0.4)
    figure.suptitle(note, fontsize=11)
    grid = figure.subplots(len(rows), 2, squeeze=False)
    for (title, curves), (left, right) in zip(rows.items(), grid):
        for name, measured in curves.items():
            style = dict(color=COLOURS.get(name), marker="o", markersize=5, linewidth=2, label=name)
            left.plot(sizes, [1e3 * cost.seconds for cost in measured], **style)
            right.plot(sizes, [cost.memory / 2**20 for cost in measured], **style)
        for axes, unit in ((left, "time, ms"), (right, "peak memory, MiB")):
            axes.set_title(title, fontsize=11)
            axes.set_ylabel(unit)
            axes.set_xlabel(axis)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.grid(color="#e6e6e6")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
    return _png(figure)
