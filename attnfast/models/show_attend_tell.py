"""Show, attend and tell: a CNN that makes a grid of features, an LSTM that attends to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_device,
    check_flag,
    check_int,
    check_like,
    check_numbers,
    describe,
    is_finite,
    is_int,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.models._checks import (
    EOS,
    PAD,
    check_share,
    check_source,
    check_step,
    check_target,
    embed,
)
from attnfast.models.decoders import FixedContext
from attnfast.nn import (
    AttentionLSTM,
    GatedAttention,
    HardAttention,
    Memory,
    MultiHeadAttention,
    RecurrentState,
)
from attnfast.nn._layer import History
from attnfast.nn._linear import linear
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask
from attnfast.ops.operators import accumulation_dtype

#: The kernel size of every convolution.
KERNEL = 3


def exists(sizes: Tensor, height: int, width: int) -> Tensor:
    """Return the mask ``[B, height, width]`` of existing cells of grids of ``sizes [B, 2]``."""
    rows, columns = (
        length_mask(size, most) for most, size in zip((height, width), sizes.unbind(-1))
    )
    return rows.unsqueeze(-1) & columns.unsqueeze(-2)


class GridEncoder(Module):
    r"""Convolutions that turn an image into a grid of features, with the position of every cell.

    .. math:: x^l = \mathrm{relu}(\mathrm{norm}(W^l * x^{l-1})), \quad
              h_{rc} = \left[x^L_{rc};\; s \left(\tfrac{2r + 1}{R} - 1\right);\;
              s \left(\tfrac{2c + 1}{C} - 1\right)\right]

    All kernels are 3 × 3. Each image is padded with zeros at its own edges, independently of the
    rest of the batch. The norm is batch normalisation over the existing cells: it uses their mean
    and deviation in training, and the running ones in evaluation. H × W pixels become
    ⌈H / S⌉ × ⌈W / S⌉ cells, with S the product of the strides, ``stride``; the receptive field of
    the cell r, c is ``field`` × ``field`` pixels around the one at S r, S c.

    Args:
        channels: number of channels of an image.
        features: number of features of each layer.
        strides: stride of each layer.
        place_scale: s; beside many features, positions of a small scale have little influence.

    Papers: Xu et al., "Show, Attend and Tell", ICML 2015, arXiv:1502.03044, whose grid is a trained
    network's of 14 × 14 cells; Ioffe and Szegedy, "Batch Normalization", ICML 2015,
    arXiv:1502.03167.

    Example:
        >>> encoder = attnfast.models.GridEncoder(channels=1, features=[4, 8], strides=[2, 2])
        >>> images, sizes = torch.rand(2, 1, 8, 12), torch.tensor([[8, 12], [8, 5]])
        >>> grids, mask = encoder(images, sizes)
        >>> grids.shape, mask.sum((1, 2))
        (torch.Size([2, 2, 3, 10]), tensor([6, 4]))
    """

    def __init__(
        self,
        channels: int,
        features: Sequence[int],
        strides: Sequence[int],
        place_scale: float = 1.0,
    ):
        super().__init__()
        for name, x in (("features", features), ("strides", strides)):
            if not isinstance(x, Sequence) or not all(map(is_int, x)):
                raise_type_error(name, "integers, one per layer", describe(x))
        if not len(features) == len(strides) > 0:
            expected = f"{len(features)}, one for each layer of features, at least one layer"
            raise_value_error("strides", expected, len(strides))
        check_sizes(channels=channels)
        if not is_finite(place_scale):
            raise_value_error("place_scale", "a finite number", describe(place_scale))
        self.place_scale = place_scale
        self.channels, self.strides, self.stride, self.field = channels, tuple(strides), 1, 1
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        before = channels
        for size, stride in zip(features, strides):
            check_sizes(features=size, strides=stride)
            layer = nn.Conv2d(before, size, KERNEL, stride, KERNEL // 2, bias=False)
            # With PyTorch's default initialisation the features vanish.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            self.layers.append(layer)
            self.norms.append(nn.BatchNorm1d(size))
            self.field += (KERNEL - 1) * self.stride
            self.stride *= stride
            before = size
        self.output_dim = before + 2

    def extra_repr(self) -> str:
        """Return the options that are not defaults."""
        return repr_fields(self, defaults={"place_scale": 1.0})

    def _check(self, images: Any, sizes: Any) -> None:
        check_array("images", images, "floating-point", ("B", self.channels, "H", "W"))
        like: Any = self.layers[0].weight
        check_like("images", images, like)
        B, _, H, W = images.shape
        check_array("sizes", sizes, "int64 or int32", (B, 2), of="images")
        for name, size, most in zip(("heights", "widths"), sizes.unbind(-1), (H, W)):
            for pixels in size.tolist():
                if not self.stride <= pixels <= most:
                    expected = f"{name} from {self.stride}, a cell, to {most}"
                    raise_value_error("sizes", expected, pixels)
        stride = 1
        for norm, step in zip(self.norms, self.strides):
            stride *= step
            cells = int((-(-sizes // stride)).prod(-1).sum())
            if norm.training and cells < 2:
                expected = f"of two cells of {stride} × {stride} pixels at least in training"
                raise_value_error("sizes", expected, cells)

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return grids ``[B, R, C, output_dim]``, 0 in padding, and the mask of existing cells.

        The mask is ``[B, R, C]``, boolean.

        Args:
            images: ``[B, channels, H, W]``; pixels beyond ``sizes`` are ignored.
            sizes: ``[B, 2]``, height and width of each image, int64 or int32: at least one cell
                each, and in training at least two in the batch.

        Raises:
            ValueError, TypeError: an argument does not fit, or a pixel is not finite.
        """
        self._check(images, sizes)
        sizes = sizes.to(images.device)
        inside = exists(sizes, *images.shape[2:])
        x = images.masked_fill(~inside.unsqueeze(1), 0)
        if not x.isfinite().all():
            raise_value_error("images", "finite numbers", "NaN or infinity")
        for layer, norm, stride in zip(self.layers, self.norms, self.strides):
            x = layer(x)
            sizes = -(-sizes // stride)
            inside = exists(sizes, *x.shape[2:])
            cells = norm(x.permute(0, 2, 3, 1)[inside]).relu()
            grid = cells.new_zeros(*inside.shape, cells.shape[-1]).index_put((inside,), cells)
            x = grid.permute(0, 3, 1, 2)
        places = []
        for most, size in zip(x.shape[2:], sizes.unbind(-1)):
            cell = torch.arange(most, dtype=accumulation_dtype(x.dtype), device=x.device)
            places.append(((2 * cell + 1) / size.unsqueeze(-1) - 1).to(x.dtype))
        rows, columns = places[0].unsqueeze(-1), places[1].unsqueeze(-2)
        place = torch.stack(torch.broadcast_tensors(rows, columns), -1)
        place = self.place_scale * place * inside.unsqueeze(-1)
        return torch.cat([grid, place], -1), inside


class MeanContext(FixedContext):
    r"""No attention: every decoder state gets the same context, the mean of the source's states.

    .. math:: c_t = \frac1n \sum_j h_j

    It has the two methods of an attention module, so that decoders need no special case.

    Example:
        >>> attention = attnfast.models.MeanContext()
        >>> states = torch.randn(2, 5, 8)
        >>> context, _ = attention(torch.randn(2, 6), attention.prepare(states))
        >>> torch.allclose(context, states.mean(1))
        True
    """

    #: Whether calls can return attention weights.
    has_weights = False

    def prepare(  # type: ignore[override]
        self,
        states: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Memory:
        """Return a memory with one value, the mean of a source's states, ``[B, 1, F]``.

        Args:
            states: ``[B, Tk, F]``.
            lengths: ``[B]``, the number of states that are not padding.
            mask: boolean ``[B, Tk]``, True for the states that are averaged.
            values: ``[B, Tk, Dv]``, averaged instead of the states.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("states", states, "floating-point", ("B", "Tk", "F"))
        if values is not None:
            B, Tk, _ = states.shape
            check_array("values", values, "floating-point", (B, Tk, "Dv"), like=states, of="states")
        states = states if values is None else values
        if mask is None:
            mask = states.new_ones(states.shape[:2], dtype=torch.bool)
        check_array("mask", mask, "boolean", states.shape[:2], like=states, of="states")
        if lengths is not None:
            check_device("lengths", lengths, states, "states")
            check_numbers("lengths", lengths, states.shape[0], 0, states.shape[1], "states")
            mask = mask & length_mask(lengths, states.shape[1])
        value = masked_mean(states, mask).unsqueeze(1)
        return Memory(value, value)


def masked_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean ``[B, F]`` of the ``states [B, Tk, F]`` where ``mask [B, Tk]`` is True."""
    dtype = accumulation_dtype(states.dtype)
    total = states.masked_fill(~mask.unsqueeze(-1), 0).sum(1, dtype=dtype)
    return (total / mask.sum(-1, keepdim=True).clamp_min(1)).to(states.dtype)


class EncodedImage(NamedTuple):
    """The encoder's output for a batch of images.

    Attributes:
        memory: of the cells of the grids, row after row.
        mask: the cells that exist, boolean ``[B, R, C]``.

    Example:
        >>> from attnfast.models import GridEncoder, ShowAttendTell
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8 + 2, attn_dim=4)
        >>> model = ShowAttendTell(GridEncoder(1, [4, 8], [2, 2]), attention, 20, 6, 3)
        >>> images, sizes = torch.rand(2, 1, 8, 12), torch.tensor([[8, 12], [8, 9]])
        >>> encoded, state = model.encode(images, sizes)
        >>> encoded.memory.key.shape, encoded.mask.shape
        (torch.Size([2, 6, 4]), torch.Size([2, 2, 3]))
    """

    memory: Memory
    mask: Tensor

    def index_select(self, index: Tensor) -> EncodedImage:
        """Return the images ``index``."""
        return EncodedImage(self.memory.index_select(index), self.mask[index])


class CaptionOutput(NamedTuple):
    """Output of :class:`ShowAttendTell` for whole captions.

    ``logits [B, T, V]`` of the word after each; ``mask [B, R, C]``, the cells of each grid that
    exist; ``weights [B, T, R · C]``, row after row of the grid, None unless requested; ``history``,
    the state of the attention, such as a :class:`attnfast.nn.HardAttentionState`.

    Example:
        >>> from attnfast.models import GridEncoder, ShowAttendTell
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8 + 2, attn_dim=4)
        >>> model = ShowAttendTell(GridEncoder(1, [4, 8], [2, 2]), attention, 20, 6, 3)
        >>> images, sizes = torch.rand(2, 1, 8, 12), torch.tensor([[8, 12], [8, 9]])
        >>> told = model(images, sizes, torch.tensor([[2, 7, 5], [2, 9, 0]]), need_weights=True)
        >>> told.weights.shape
        torch.Size([2, 3, 6])
    """

    logits: Tensor
    mask: Tensor
    weights: Tensor | None = None
    history: History | None = None


class ShowAttendTell(Module):
    r"""A CNN that makes a grid of features, and an LSTM that attends to it and writes a caption.

    .. math:: a = \mathrm{Show}(x), \quad
              h_0 = \tanh(W_h \bar a + b_h), \quad c_0 = \tanh(W_c \bar a + b_c)

    .. math:: z_t = \mathrm{attend}(h_{t-1}, a), \quad
              h_t = \mathrm{LSTM}([E y_{t-1}; z_t], h_{t-1}), \quad
              P(y_t) = \mathrm{softmax}(W_o (E y_{t-1} + W_s h_t + W_z z_t))

    with ā the mean of an image's features. The decoder is one :class:`attnfast.nn.AttentionLSTM`,
    which runs a whole caption as one operator if its attention has one. The model has the methods
    ``encode`` and ``decode`` of :class:`Seq2Seq`, so that the searches of
    :mod:`attnfast.decoding` accept it, with images as the source and their sizes as lengths.

    Args:
        encoder: maps images and sizes to grids.
        attention: of the decoder, with queries of ``hidden_dim`` and keys of the encoder's
            features: from :mod:`attnfast.nn` a ``BahdanauAttention``, ``LuongAttention``,
            ``TopKAttention`` or ``CoverageAttention``, alone or inside
            :class:`attnfast.nn.GatedAttention` or :class:`attnfast.nn.HardAttention`, the latter
            only around attention without a history; or :class:`MeanContext`. Attention that
            depends on the order of keys, which padding would change, and attention with heads are
            not supported.
        vocab_size: V, at least the four special ids and a word.
        hidden_dim, embed_dim: features of the decoder's states, and of a word.
        dropout: on words and on the input of the output layer.
        max_length: largest number of words of a caption in a search, the end included.

    Paper: Xu et al., "Show, Attend and Tell: Neural Image Caption Generation with Visual
    Attention", ICML 2015, arXiv:1502.03044.

    Example:
        >>> from attnfast.models import GridEncoder, ShowAttendTell
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8 + 2, attn_dim=4)
        >>> model = ShowAttendTell(GridEncoder(1, [4, 8], [2, 2]), attention, 20, 6, 3)
        >>> images, sizes = torch.rand(2, 1, 8, 12), torch.tensor([[8, 12], [8, 9]])
        >>> model(images, sizes, torch.tensor([[2, 7, 5], [2, 9, 0]])).logits.shape
        torch.Size([2, 3, 20])
        >>> captions = attnfast.decoding.beam_search(model.eval(), images, sizes, beam=2).best
    """

    def __init__(
        self,
        encoder: GridEncoder,
        attention: nn.Module,
        vocab_size: int,
        hidden_dim: int,
        embed_dim: int,
        dropout: float = 0.0,
        max_length: int = 50,
    ):
        super().__init__()
        if not isinstance(encoder, nn.Module) or not hasattr(encoder, "output_dim"):
            raise_type_error("encoder", "a GridEncoder", describe(encoder))
        check_int("vocab_size", vocab_size, EOS + 2)
        check_sizes(hidden_dim=hidden_dim, embed_dim=embed_dim, max_length=max_length)
        check_share("dropout", dropout)
        inner = attention
        while isinstance(inner, (GatedAttention, HardAttention)):
            inner = inner.attention
        # The order of cells depends on the width of the batch, as they are rows of a grid.
        if getattr(inner, "knows_order", False) or isinstance(inner, MultiHeadAttention):
            expected = "one that knows no order of keys and has no heads, as BahdanauAttention"
            raise_type_error("attention", expected, type(inner).__name__)
        context_dim = encoder.output_dim
        self.encoder, self.max_length = encoder, max_length
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.decoder = AttentionLSTM(embed_dim, hidden_dim, context_dim, attention)
        self.first_hidden = nn.Linear(context_dim, hidden_dim)
        self.first_cell = nn.Linear(context_dim, hidden_dim)
        self.readout = nn.Linear(hidden_dim + context_dim, embed_dim)
        self.output = nn.Linear(embed_dim, vocab_size)
        self.dropout = nn.Dropout(dropout)

    def extra_repr(self) -> str:
        """Return the most words of a caption."""
        return repr_fields(self, ("max_length",))

    def output_limit(self, sizes: Tensor) -> Tensor:
        """Return the largest number of words of the captions of images ``sizes [B, 2]``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("sizes", sizes, "int64 or int32", ("B", 2))
        return torch.full((len(sizes),), self.max_length)

    def encode(self, images: Tensor, sizes: Tensor) -> tuple[EncodedImage, RecurrentState]:
        """Encode images and project their keys, once.

        Args:
            images: ``[B, channels, H, W]``.
            sizes: ``[B, 2]``, height and width of each image.

        Returns:
            The encoded images, and the decoder's state before the first word.

        Raises:
            ValueError, TypeError: an argument does not fit, or a pixel is not finite.
        """
        grid, mask = self.encoder(images, sizes)
        states, seen = grid.flatten(1, 2), mask.flatten(1)
        memory = self.decoder.attention.prepare(states, mask=seen)
        mean = masked_mean(states, seen)
        h, c = (layer(mean).tanh().unsqueeze(0) for layer in (self.first_hidden, self.first_cell))
        return EncodedImage(memory, mask), RecurrentState(h, c)

    def decode(
        self,
        words: Tensor,
        state: RecurrentState,
        encoded: EncodedImage,
        need_weights: bool = False,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        """Read words from ``state`` on.

        Args:
            words: ids ``[B, T]``.
            state: from :meth:`encode`, or from the last call.
            encoded: from :meth:`encode`.
            need_weights: return the attention weights too.

        Returns:
            ``logits [B, T, V]`` of the word after each, the state after the last, and
            ``weights [B, T, R · C]`` if requested.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_source("encoded", encoded, EncodedImage, state)
        check_flag("need_weights", need_weights)
        try:
            return self._tell(words, state, encoded, need_weights, None)
        except Exception:
            context_dim, hidden = self.decoder.context_size, (1, self.decoder.hidden_size)
            check_step(words, state, encoded, "encoded", context_dim, hidden, self.output.weight)
            raise

    def _tell(
        self,
        words: Tensor,
        state: RecurrentState,
        encoded: EncodedImage,
        need_weights: bool,
        lengths: Tensor | None,
    ) -> tuple[Tensor, RecurrentState, Tensor | None]:
        embedded = self.dropout(embed("words", words, self.embedding))
        result = self.decoder(
            embedded, encoded.memory, state, target_lengths=lengths, need_weights=need_weights
        )
        backend = getattr(self.decoder.attention, "backend", None)
        read = self.dropout(torch.cat([result.states, result.contexts], -1))
        read = embedded + linear(read, self.readout.weight, self.readout.bias, backend)
        logits = linear(self.dropout(read), self.output.weight, self.output.bias, backend)
        return logits, result.state, result.weights

    def forward(
        self, images: Tensor, sizes: Tensor, target_in: Tensor, need_weights: bool = False
    ) -> CaptionOutput:
        """Read images and the true words before each word of their captions.

        An image has N consecutive captions and is encoded once. Results have one row for each
        caption.

        Args:
            images, sizes: as in :meth:`encode`.
            target_in: ids ``[B · N, T]`` that begin with the start, padded with 0.
            need_weights: return the attention weights too.

        Raises:
            ValueError, TypeError: an argument does not fit, or a pixel is not finite.
        """
        check_target(target_in, self.embedding, self.embedding.num_embeddings)
        check_flag("need_weights", need_weights)
        if isinstance(self.encoder, GridEncoder):  # in training encoding images updates its norms
            self.encoder._check(images, sizes)
        B = images.shape[0]
        count = max(target_in.shape[0] // max(B, 1), 1)
        if target_in.shape[0] != B * count:
            raise_value_error(
                "target_in", f"as many captions of each of {B} images", target_in.shape[0]
            )
        encoded, state = self.encode(images, sizes)
        if count != 1:
            index = torch.arange(B, device=images.device).repeat_interleave(count)
            encoded, state = encoded.index_select(index), state.index_select(index)
        counts = (target_in != PAD).sum(-1)
        logits, state, weights = self._tell(target_in, state, encoded, need_weights, counts)
        return CaptionOutput(logits, encoded.mask, weights, state.history)
