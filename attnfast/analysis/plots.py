"""Plots that are drawn in memory: every function returns the bytes of a PNG file.

An argument that does not fit raises ValueError or TypeError, and the message names it. Without
matplotlib every function raises InputError, a ValueError.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from attnfast._utils.benchmark import Cost
from attnfast._utils.checks import (
    check_array,
    check_number,
    check_range,
    describe,
    is_int,
    optional,
    raise_type_error,
    raise_value_error,
)
from attnfast.ops.span import to_dense

__all__ = [
    "draw_addressing",
    "draw_alignment",
    "draw_hops",
    "draw_listening",
    "draw_looking",
    "draw_pointing",
    "draw_speed",
]

COLOURS = {
    "none": "#8a8f98",
    "eager": "#d1495b",
    "torch.compile": "#edae49",
    "fused": "#00798c",
    "attnfast": "#00798c",
}


def _figure(width: float, height: float) -> Any:
    return optional("matplotlib.figure", "drawing").Figure((width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


#: The largest number of words next to each other in a picture, and their largest width in inches.
MOST_WORDS, MOST_INCHES = 40, 18.0


def _fonts_for(words: Iterable[str]) -> list[str]:
    """Return fonts of this machine that together have the letters of all words, if possible.

    The first is the default font; matplotlib searches the fonts in order for each letter.
    """
    manager = optional("matplotlib.font_manager", "drawing")
    open_font = optional("matplotlib.ft2font", "drawing").FT2Font
    usual = manager.findfont(manager.FontProperties())
    missing = {ord(x) for word in words for x in word if x.isprintable()}
    missing -= open_font(usual).get_charmap().keys()
    names = [manager.FontProperties(fname=usual).get_name()]
    for entry in sorted(manager.fontManager.ttflist, key=lambda x: (x.style, x.weight != 400)):
        if not missing:
            break
        if "Last Resort" in entry.name:  # a frame for every letter
            continue
        found = missing & open_font(entry.fname).get_charmap().keys()
        if found:
            names.append(entry.name)
            missing -= found
    if missing:
        letters = "".join(map(chr, sorted(missing)[:8]))
        warnings.warn(
            f"no font of this machine has {letters}: frames stand for them (Debian: apt install "
            "fonts-noto fonts-noto-cjk)",
            stacklevel=3,
        )
    return names


def _check_words(name: str, words: object, count: int | None = None, of: str = "weights") -> None:
    """Raise unless words are strings, ``count`` of them if given, to fit ``of``."""
    if not isinstance(words, Sequence) or not all(isinstance(x, str) for x in words):
        raise_type_error(name, "texts", describe(words))
    if count is not None and len(words) != count:
        raise_value_error(name, f"{count} words, as {of} have", len(words))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise_type_error(name, "a text", describe(text))


def draw_alignment(
    weights: Tensor,
    source: Sequence[str],
    target: Sequence[str],
    *,
    key_indices: Tensor | None = None,
    titles: tuple[str, str] = ("source: what is read", "target: what is written"),
) -> bytes:
    """Draw a heatmap: a row for each target word, a column for each source word.

    Long sentences get smaller letters, and beyond 40 words a label for every second word, every
    third and so on. Letters missing from the default font come from another font of the machine, if
    one has them.

    Args:
        weights: ``[T, Tk]``, or ``[H, T, Tk]`` with a map for each head.
        source, target: Tk and T words.
        key_indices: key indices of the columns, ``[T, W]`` or ``[H, T, W]`` from
            :meth:`attnfast.Span.key_indices`, if the weights are those of a span, ``[.., T, W]``.
        titles: of the columns and of the rows.

    Raises:
        ValueError: the numbers of words differ from those of rows and columns.

    Example:
        >>> from attnfast.analysis.plots import draw_alignment
        >>> weights = torch.eye(3)
        >>> png = draw_alignment(weights, "a b c".split(), "x y z".split())
        >>> png[1:4]
        b'PNG'
    """
    check_array("weights", weights, "floating-point", ("T", "Tk"), ("H", "T", "Tk"))
    for name, words in (("source", source), ("target", target), ("titles", titles)):
        _check_words(name, words)
    if len(titles) != 2:
        raise_value_error("titles", "two, of columns and of rows", len(titles))
    if key_indices is not None:
        check_array(
            "key_indices", key_indices, "int64", weights.shape[-2:], weights.shape, of="weights"
        )
        check_range(
            "key_indices", key_indices, -1, len(source) - 1, "words of source, or -1 for none,"
        )
        weights = to_dense(weights, key_indices.to(weights.device), len(source))
    weights = weights.detach().float().cpu()
    _check_words("source", source, weights.shape[-1])
    _check_words("target", target, weights.shape[-2])
    heads = weights.unsqueeze(0) if weights.dim() == 2 else weights
    across = min(len(heads), 2 if max(len(source), len(target)) > 12 else 4)
    down = -(-len(heads) // max(across, 1))
    width, height = (
        min(margin + each * max(len(words), 1), MOST_INCHES / (1 if count == 1 else 1.5))
        for margin, each, words, count in ((2.2, 0.42, source, across), (1.7, 0.36, target, down))
    )
    rc_context = optional("matplotlib", "drawing").rc_context
    fonts = _fonts_for([*source, *target])
    with rc_context({"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # _fonts_for has warned
        figure = _figure(width * max(across, 1), height * max(down, 1))
        grid = figure.subplots(max(down, 1), max(across, 1), squeeze=False)
        image = None
        for number, axes in enumerate(grid.flat):
            if number >= len(heads):
                axes.set_visible(False)
                continue
            image = axes.imshow(
                heads[number].numpy(), cmap="GnBu", vmin=0, vmax=1, aspect="auto",
                interpolation="nearest",
            )  # fmt: skip
            _label(axes, source, target, titles)
            if len(heads) > 1:
                axes.set_title(f"head {number + 1}", fontsize=11)
        if image is not None:
            bar = figure.colorbar(
                image, ax=grid, shrink=0.8, pad=0.03, aspect=30, label="attention weight"
            )
            bar.outline.set_visible(False)
        return _png(figure)


def _label(
    axes: Any, source: Sequence[str], target: Sequence[str], titles: tuple[str, str]
) -> None:
    """Put words next to the rows and above the columns of a heatmap."""
    every = [-(-len(words) // MOST_WORDS) or 1 for words in (source, target)]
    columns, rows = (range(0, len(x), step) for x, step in zip((source, target), every))
    size = 10 * min(1.0, 28 / max(len(columns), len(rows), 1))
    # a dollar sign would begin a formula
    names = [[words[i].replace("$", r"\$") for i in at] for words, at in
             ((source, columns), (target, rows))]  # fmt: skip
    axes.set_xticks(columns, names[0], rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(rows, names[1])
    axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
    axes.tick_params(labelsize=size)
    if max(len(source), len(target)) <= MOST_WORDS:
        axes.set_xticks([i - 0.5 for i in range(1, len(source))], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, len(target))], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0, top=False)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(titles[0], labelpad=8)
    axes.set_ylabel(titles[1], labelpad=8)


def draw_listening(features: Tensor, weights: Tensor, letters: Sequence[str], hop: float) -> bytes:
    """Draw a decoder's attention: weights below the spectrogram, on the same time axis.

    Args:
        features: ``[T, M]``, such as log-mel ones.
        weights: ``[L, Tk]``, a row for each letter; the keys divide the time of T frames evenly.
        letters: L.
        hop: seconds from a frame to the next.

    Example:
        >>> from attnfast.analysis.plots import draw_listening
        >>> features, weights = torch.randn(20, 40), torch.rand(2, 5)
        >>> png = draw_listening(features, weights, "no", hop=0.01)
        >>> png[1:4]
        b'PNG'
    """
    check_array("features", features, "floating-point", ("T", "M"))
    check_array("weights", weights, "floating-point", ("L", "Tk"))
    _check_words("letters", letters, len(weights))
    check_number("hop", hop, 0)
    seconds = hop * len(features)
    figure = _figure(min(3 + 2.2 * seconds, MOST_INCHES), 2.6 + 0.17 * len(letters))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 0.6 + 0.17 * len(letters)])
    for axes, x, colours, label in (
        (top, features.T, "magma", "log-mel feature"), (bottom, weights, "GnBu", "letter"),
    ):  # fmt: skip
        low = 0 if axes is bottom else None
        axes.imshow(
            x.detach().float().cpu().numpy(), cmap=colours, vmin=low, aspect="auto",
            interpolation="nearest", origin="upper" if axes is bottom else "lower",
            extent=(0, seconds, len(x) - 0.5, -0.5) if axes is bottom else
            (0, seconds, -0.5, len(x) - 0.5),
        )  # fmt: skip
        axes.set_ylabel(label)
        axes.spines[:].set_visible(False)
    bottom.set_yticks(range(len(letters)), [x.replace(" ", "␣") for x in letters], fontsize=8)
    bottom.tick_params(axis="y", length=0)
    bottom.set_xlabel("time, s")
    return _png(figure)


def draw_hops(weights: Tensor, sentences: Sequence[str], question: str) -> bytes:
    """Draw a memory network's attention: a row for each sentence, a column for each hop.

    Args:
        weights: ``[K, S]``.
        sentences: S.
        question: the question, shown above the columns.

    Example:
        >>> from attnfast.analysis.plots import draw_hops
        >>> sentences = ["Mary went home.", "John took the milk."]
        >>> png = draw_hops(torch.rand(3, 2), sentences, "Where is Mary?")
        >>> png[1:4]
        b'PNG'
    """
    _check_words("sentences", sentences)
    _check_text("question", question)
    check_array("weights", weights, "floating-point", ("K", len(sentences)), of="sentences")
    hops, longest = len(weights), max(map(len, [*sentences, question]))
    figure = _figure(1.5 + 0.08 * longest + 0.5 * hops, 0.9 + 0.24 * len(sentences))
    axes = figure.subplots()
    axes.imshow(weights.T.detach().float().cpu().numpy(), cmap="GnBu", vmin=0, aspect="auto")
    axes.set_xticks(range(hops), [str(i + 1) for i in range(hops)])
    axes.set_yticks(range(len(sentences)), sentences, fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("hop")
    figure.suptitle(question, fontsize=10)
    return _png(figure)


def draw_pointing(
    points: Tensor, target: Sequence[int], predicted: Sequence[int], weights: Tensor
) -> bytes:
    """Draw the polygon of a pointer network over the true one, and the weights of each step.

    Args:
        points: ``[N, 2]``.
        target, predicted: the corners of the true polygon and of the network's, as indices of
            points from 0 on.
        weights: ``[T, 1 + N]``, a row for each step: the end, then the points.

    Example:
        >>> from attnfast.analysis.plots import draw_pointing
        >>> points, weights = torch.rand(4, 2), torch.rand(4, 5)
        >>> png = draw_pointing(points, [0, 1, 2], [0, 2, 3], weights)
        >>> png[1:4]
        b'PNG'
    """
    check_array("points", points, "floating-point", ("N", 2))
    check_array("weights", weights, "floating-point", ("T", 1 + len(points)), of="points")
    for name, corners in (("target", target), ("predicted", predicted)):
        if not isinstance(corners, Sequence) or not all(map(is_int, corners)):
            raise_type_error(name, "numbers of points", describe(corners))
        for corner in corners:
            if not 0 <= corner < len(points):
                raise_value_error(name, f"below {len(points)}, the number of points", corner)
    figure = _figure(9, 4.2)
    left, right = figure.subplots(1, 2)
    for corners, style in (
        (target, dict(color=COLOURS["none"], linestyle="--", linewidth=2, label="hull")),
        (predicted, dict(color=COLOURS["fused"], linewidth=1.5, label="pointed at")),
    ):
        x, y = points[[*corners, *corners[:1]]].detach().float().cpu().unbind(-1)
        left.plot(x.tolist(), y.tolist(), **style)
    for number, (x, y) in enumerate(points.tolist()):
        left.plot(x, y, "o", color="black", markersize=4)
        left.annotate(str(number + 1), (x, y), (4, 4), textcoords="offset points", fontsize=9)
    left.set_aspect("equal")
    left.margins(0.08)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    image = right.imshow(
        weights.detach().float().cpu().numpy(), cmap="GnBu", vmin=0, vmax=1, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    right.set_xticks(range(1 + len(points)), ["end", *map(str, range(1, 1 + len(points)))])
    right.set_yticks(range(len(weights)), list(map(str, range(1, 1 + len(weights)))))
    right.tick_params(length=0)
    right.set_xlabel("point")
    right.set_ylabel("step")
    bar = figure.colorbar(image, ax=right, label="attention weight")
    for drawn in (left, right, bar.ax):
        drawn.spines[:].set_visible(False)
    return _png(figure)


def draw_addressing(x: Tensor, output: Tensor, read: Tensor, written: Tensor) -> bytes:
    """Draw the head weights of a :class:`attnfast.nn.NeuralTuringMachine`, step by step.

    Args:
        x, output: ``[T, ·]``, the inputs and the outputs, from 0 to 1.
        read, written: ``[T, heads, N]``, the weights of heads that read and of those that write.

    Example:
        >>> from attnfast.analysis.plots import draw_addressing
        >>> machine = attnfast.nn.NeuralTuringMachine(3, 8, num_slots=10, slot_size=4)
        >>> x = torch.rand(1, 6, 3)
        >>> output, _, weights = machine(x, need_weights=True)
        >>> read, written = weights[0, :, :1], weights[0, :, 1:]
        >>> png = draw_addressing(x[0], output[0].sigmoid(), read, written)
        >>> png[1:4]
        b'PNG'
    """
    check_array("x", x, "floating-point", ("T", "features"))
    steps = len(x)
    check_array("output", output, "floating-point", (steps, "features"), of="x")
    check_array("read", read, "floating-point", (steps, "heads", "N"), of="x")
    check_array("written", written, "floating-point", (steps, "heads", "N"), of="x")
    parts = {"input": x, "output": output}
    for name, weights in (("written at", written), ("read at", read)):
        for h in range(weights.shape[1]):
            parts[f"{name}, head {h + 1}" if weights.shape[1] > 1 else name] = weights[:, h]
    figure = _figure(1 + min(0.12 * len(x), 14), 1 + 0.07 * sum(p.shape[1] for p in parts.values()))
    ratios = [part.shape[1] for part in parts.values()]
    rows = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, (name, part) in zip(rows, parts.items()):
        image = axes.imshow(
            part.T.detach().float().cpu().numpy(), cmap="GnBu", vmin=0, vmax=1, aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
        axes.set_ylabel(name)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    rows[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=list(rows), label="weight")
    bar.outline.set_visible(False)
    return _png(figure)


def draw_looking(image: Tensor, maps: Tensor, words: Sequence[str]) -> bytes:
    """Draw a captioning model's attention: the image, and a copy for every word lit by its weights.

    Args:
        image: ``[H, W]``, 0 for paper and 1 for ink.
        maps: ``[T, H, W]``, the weights resized to the image.
        words: T.

    Example:
        >>> from attnfast.analysis.plots import draw_looking
        >>> image, maps = torch.rand(8, 12), torch.rand(2, 8, 12)
        >>> png = draw_looking(image, maps, ["a", "cat"])
        >>> png[1:4]
        b'PNG'
    """
    check_array("image", image, "floating-point", ("H", "W"))
    check_array("maps", maps, "floating-point", ("T", *image.shape), of="image")
    _check_words("words", words, len(maps), "maps")
    across = 8
    down = -(-(len(words) + 1) // across)
    figure = _figure(1.5 * across, 1.7 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes in panels:
        axes.set_axis_off()
    ink, light = image.detach().float().cpu().numpy(), maps.detach().float().cpu().numpy()
    for number, (axes, title) in enumerate(zip(panels, ["", *words])):
        axes.imshow(ink, cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, fontsize=10)
        if number:
            axes.imshow(light[number - 1], cmap="magma", vmin=0, alpha=0.65)
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
        note: a description of the measurement, shown above all charts.
        axis: the label of the sizes.

    Example:
        >>> from attnfast.analysis.plots import draw_speed
        >>> from types import SimpleNamespace
        >>> costs = [SimpleNamespace(seconds=0.1 * n, memory=n * 2**20) for n in (1, 2)]
        >>> png = draw_speed({"GRU": {"eager": costs}}, sizes=[1, 2], note="one core")
        >>> png[1:4]
        b'PNG'
    """
    if not isinstance(rows, Mapping) or not all(isinstance(x, Mapping) for x in rows.values()):
        raise_type_error("rows", "costs by title and by curve", describe(rows))
    if not rows:
        raise_value_error("rows", "costs of at least one title", describe(rows))
    if not isinstance(sizes, Sequence) or not all(map(is_int, sizes)):
        raise_type_error("sizes", "integers", describe(sizes))
    _check_text("note", note)
    _check_text("axis", axis)
    for curves in rows.values():
        for measured in curves.values():
            if not isinstance(measured, Sequence) or len(measured) != len(sizes):
                raise_value_error(
                    "rows", f"of {len(sizes)} costs a curve, as sizes", describe(measured)
                )
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
