"""Bidirectional attention flow: find the span of a text that answers a question."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_device,
    check_flag,
    check_int,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast.models._checks import PAD, check_characters, check_lengths, check_share, embed
from attnfast.models.embeddings import CharacterCNN, HighwayNetwork
from attnfast.models.encoders import Encoder
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask


class SpanPrediction(NamedTuple):
    """Log-probabilities of an answer's first and last word.

    Attributes:
        start: log-probabilities of the first word, ``[B, T]``, −inf for padding.
        end: log-probabilities of the last word, ``[B, T]``, −inf for padding.
        weights: the weights that the attention returned, or None.

    Example:
        >>> attention = attnfast.nn.BidirectionalAttention(dim=8)
        >>> model = attnfast.models.BiDAF(attention, 32, vocab_size=50, embed_dim=3, hidden_dim=4)
        >>> words, lengths = torch.randint(4, 50, (2, 9)), torch.tensor([9, 7])
        >>> answer = model(words, lengths, words, lengths)
        >>> torch.allclose(answer.start.exp().sum(-1), torch.ones(2))
        True
    """

    start: Tensor
    end: Tensor
    weights: tuple[Tensor, Tensor] | None = None


class BiDAF(Module):
    r"""Bidirectional attention flow: predict the first and the last word of an answer in a text.

    .. math:: h = \mathrm{BiRNN}(\mathrm{highway}([E x; \mathrm{CNN}(x)])), \quad
              u = \mathrm{BiRNN}(\mathrm{highway}([E q; \mathrm{CNN}(q)]))

    .. math:: g = \mathrm{attend}(h, u), \quad m = \mathrm{BiRNN}(g)

    .. math:: P(s) = \mathrm{softmax}_t(w_s \cdot [g_t; m_t]), \quad
              P(e) = \mathrm{softmax}_t(w_e \cdot [g_t; m^2_t]), \quad m^2 = \mathrm{BiRNN}(m)

    Text and question share the embedding E, the CNN, the highway layers and the first BiRNN. The
    CNN, which reads the characters of each word, and the highway layers are options; the paper's
    model has both.

    Args:
        attention: called as :class:`attnfast.nn.BidirectionalAttention` of 2H features.
        features: number of features of each g.
        vocab_size, embed_dim, hidden_dim: V, features of a word, and H, features of each direction.
        dropout: on the input of the BiRNN over the words, on g and on the states m.
        backend: backend of the recurrent layers.
        characters: a :class:`CharacterCNN`, or None.
        highway_layers: number of layers of a :class:`HighwayNetwork`, 0 for none; the paper's
            model has 2.

    Paper: Seo et al., "Bidirectional Attention Flow for Machine Comprehension", ICLR 2017,
    arXiv:1611.01603.

    Example:
        >>> attention = attnfast.nn.BidirectionalAttention(dim=8)
        >>> model = attnfast.models.BiDAF(attention, 32, vocab_size=50, embed_dim=3, hidden_dim=4)
        >>> text, question = torch.randint(4, 50, (2, 9)), torch.randint(4, 50, (2, 4))
        >>> answer = model(text, torch.tensor([9, 7]), question, torch.tensor([4, 3]))
        >>> attnfast.models.best_spans(answer.start, answer.end).shape
        torch.Size([2, 2])

        With the characters of each word, here 6 at most:

        >>> cnn = attnfast.models.CharacterCNN(num_characters=30, embed_dim=4, output_dim=5)
        >>> model = attnfast.models.BiDAF(attention, 32, 50, 3, 4, characters=cnn, highway_layers=2)
        >>> spelling = torch.randint(1, 30, (50, 6))  # of each word of the vocabulary
        >>> answer = model(
        ...     text, torch.tensor([9, 7]), question, torch.tensor([4, 3]),
        ...     text_characters=spelling[text], question_characters=spelling[question],
        ... )
    """

    def __init__(
        self,
        attention: nn.Module,
        features: int,
        vocab_size: int,
        embed_dim: int,
        hidden_dim: int,
        dropout: float = 0.0,
        backend: str | None = None,
        *,
        characters: CharacterCNN | None = None,
        highway_layers: int = 0,
    ):
        super().__init__()
        if not isinstance(attention, nn.Module):
            raise_type_error("attention", "a module", describe(attention))
        check_sizes(
            features=features, vocab_size=vocab_size, embed_dim=embed_dim, hidden_dim=hidden_dim
        )
        check_share("dropout", dropout)
        if not isinstance(characters, (CharacterCNN, type(None))):
            raise_type_error("characters", "a CharacterCNN or None", describe(characters))
        check_int("highway_layers", highway_layers, least=0)
        size = embed_dim + (characters.output_dim if characters else 0)
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.characters = characters
        self.highway = HighwayNetwork(size, highway_layers) if highway_layers else None
        self.encoder = Encoder(size, hidden_dim, backend=backend)
        self.attention: Any = attention
        self.modeling = Encoder(features, hidden_dim, backend=backend)
        self.ending = Encoder(2 * hidden_dim, hidden_dim, backend=backend)
        self.start = nn.Linear(features + 2 * hidden_dim, 1, bias=False)
        self.end = nn.Linear(features + 2 * hidden_dim, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        text: Tensor,
        text_lengths: Tensor,
        question: Tensor,
        question_lengths: Tensor,
        need_weights: bool = False,
        text_characters: Tensor | None = None,
        question_characters: Tensor | None = None,
    ) -> SpanPrediction:
        """Return the log-probabilities of the answer's first and last word.

        Args:
            text, question: ``[B, T]`` and ``[B, J]``, word ids.
            text_lengths, question_lengths: ``[B]``, the numbers of words without padding.
            need_weights: return the attention's weights too.
            text_characters, question_characters: ``[B, T, L]`` and ``[B, J, L']``, the characters
                of each word as in :class:`CharacterCNN`; None for a model without one.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_flag("need_weights", need_weights)
        read = []
        for name, words, lengths, characters in (
            ("text", text, text_lengths, text_characters),
            ("question", question, question_lengths, question_characters),
        ):
            embedded = embed(name, words, self.embedding)
            if words.shape[0] != text.shape[0]:
                raise_value_error(
                    "question", f"of {text.shape[0]} sequences, as text", describe(words)
                )
            check_lengths(lengths, words, name=f"{name}_lengths", whose=name)
            if self.characters is not None:
                shape = *words.shape, "L"
                check_characters(f"{name}_characters", characters, shape, self.characters.embedding)
                assert characters is not None
                embedded = torch.cat([embedded, self.characters(characters)], -1)
            elif characters is not None:
                expected = "None for a model without a character CNN"
                raise_value_error(f"{name}_characters", expected, describe(characters))
            if self.highway is not None:
                embedded = self.highway(embedded)
            read.append(self.encoder(self.dropout(embedded), lengths))
        both = (x.to(text.device) for x in (text_lengths, question_lengths))
        g, weights = self.attention(*read, *both, need_weights)
        g = self.dropout(g)
        m = self.dropout(self.modeling(g, text_lengths))
        last = self.dropout(self.ending(m, text_lengths))
        beyond = ~length_mask(text_lengths, text.shape[1], text)
        start, end = (
            layer(torch.cat([g, states], -1))
            .squeeze(-1)
            .masked_fill(beyond, -torch.inf)
            .log_softmax(-1)
            for layer, states in ((self.start, m), (self.end, last))
        )
        return SpanPrediction(start, end, weights)


def best_spans(start: Tensor, end: Tensor, max_length: int | None = None) -> Tensor:
    r"""Return the most probable first and last word, :math:`s \le e < s + \mathrm{max_length}`.

    Args:
        start, end: ``[B, T]``, log-probabilities.
        max_length: largest number of words of an answer; None for no limit.

    Returns:
        ``[B, 2]``, int64.

    Raises:
        ValueError, TypeError: an argument does not fit, or a log-probability is NaN.

    Example:
        >>> start, end = torch.tensor([[0.1, 0.9]]).log(), torch.tensor([[0.8, 0.2]]).log()
        >>> attnfast.models.best_spans(start, end)  # a start after the end is not allowed
        tensor([[1, 1]])
    """
    for name, x in (("start", start), ("end", end)):
        check_array(name, x, "floating-point", ("B", "T"))
        if x.isnan().any():
            raise_value_error(name, "log-probabilities", "NaN")
    if start.shape != end.shape or not start.shape[1]:
        raise_value_error(
            "start and end", "of the same [B, T]", f"{describe(start)} and {describe(end)}"
        )
    check_device("end", end, start, "start")
    T = start.shape[1]
    if max_length is not None:
        check_int("max_length", max_length)
    both = start.unsqueeze(-1) + end.unsqueeze(1)
    allowed = torch.ones(T, T, dtype=torch.bool, device=start.device).triu()
    allowed = allowed.tril(T if max_length is None else max_length - 1)
    best = both.masked_fill(~allowed, -torch.inf).flatten(1).argmax(-1)
    return torch.stack([best // T, best % T], -1)
