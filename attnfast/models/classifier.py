"""A classifier of sentences: a bidirectional RNN, a pool of its states, a linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_choice,
    check_exact,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.models._checks import PAD, check_ids, check_lengths, check_share, embed
from attnfast.models.encoders import Encoder
from attnfast.nn import BahdanauAttention
from attnfast.nn.attention import check_sizes
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import check_backend
from attnfast.ops.operators import accumulation_dtype

if TYPE_CHECKING:
    from attnfast.analysis.faithfulness import Decision

POOLINGS = ("attention", "mean", "max")


class Classifier(Module):
    r"""A sentence classifier: an encoder, a pool of the states :math:`h_j`, a linear layer.

    ==============  =========================================================================
    ``pooling``     :math:`c`
    ==============  =========================================================================
    ``attention``   :math:`\sum_j \alpha_j h_j, \; \alpha = \mathrm{softmax}_j\, w^\top
                    \tanh(W_q s + W_k h_j)`, the query s a parameter
    ``mean``        :math:`\frac1n \sum_j h_j`
    ``max``         the maximum of each feature of :math:`h_j`
    ==============  =========================================================================

    Args:
        encoder: maps words ``[B, n, E]`` and lengths to states ``[B, n, 2H]``.
        vocab_size, embed_dim, classes: V, E and C.
        pooling: one of the table.
        dropout: on words and on the pooled states.
        backend: of the attention, as in :func:`attnfast.additive_attention`.

    Paper: Yang et al., "Hierarchical Attention Networks for Document Classification", NAACL 2016,
    of whose two levels this is the lower one.

    Example:
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(3, 4), vocab_size=50, embed_dim=3, classes=2)
        >>> model(torch.randint(4, 50, (2, 5)), torch.tensor([5, 3])).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        encoder: Encoder,
        vocab_size: int,
        embed_dim: int,
        classes: int,
        pooling: str = "attention",
        dropout: float = 0.0,
        backend: str | None = None,
    ):
        super().__init__()
        if not isinstance(encoder, nn.Module) or not hasattr(encoder, "output_dim"):
            raise_type_error("encoder", "a module, as encoders of this package", describe(encoder))
        check_sizes(vocab_size=vocab_size, embed_dim=embed_dim, classes=classes)
        check_choice("pooling", pooling, POOLINGS)
        check_share("dropout", dropout)
        check_backend(backend)
        self.encoder, self.pooling = encoder, pooling
        self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.dropout = nn.Dropout(dropout)
        features = encoder.output_dim
        self.output = nn.Linear(features, classes)
        if pooling == "attention":
            self.attention = BahdanauAttention(features, features, features, backend=backend)
            self.query = nn.Parameter(torch.zeros(features).normal_(std=features**-0.5))

    def extra_repr(self) -> str:
        """Return the pooling."""
        return repr_fields(self, ("pooling",))

    def embed(self, words: Tensor) -> Tensor:
        """Return the embedded words ``[B, n, E]`` of ``words [B, n]``.

        Raises:
            ValueError, TypeError: ``words`` are not ids of the vocabulary.
        """
        return self.dropout(embed("words", words, self.embedding))

    def read(self, embedded: Tensor, lengths: Tensor) -> Decision:
        """Read embedded words: a reader of :mod:`attnfast.analysis.faithfulness`.

        Args:
            embedded: ``[B, n, E]``, from :meth:`embed`.
            lengths: ``[B]``, each at least 1.

        Returns:
            A function from weights ``[B, n]``, or None for the model's own, to logits ``[B, C]``
            and the weights that it pooled with. Max pooling has no weights.

        Raises:
            ValueError, TypeError: an argument does not fit, or the model pools by ``"max"``; the
                returned function raises if its weights do not fit.
        """
        if self.pooling == "max":
            raise_value_error("pooling", "attention or mean, to have weights", repr(self.pooling))
        states, exists = self._states(embedded, lengths)
        even = exists.to(accumulation_dtype(states.dtype)) / exists.sum(1, keepdim=True)
        memory = None
        if self.pooling == "attention":
            memory = self.attention.prepare(states, lengths.to(states.device))

        def decide(weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if weights is None and memory is not None:
                context, own = self.attention(self.query.expand(len(states), -1), memory, True)
                assert own is not None
                return self._decide(context), own
            used = even.to(states.dtype) if weights is None else weights
            check_exact(states, [("weights", used, states.dtype, exists.shape)])
            return self._decide((used.unsqueeze(1) @ states).squeeze(1)), used

        return decide

    def _states(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states ``[B, n, 2H]`` and the mask of those that are not padding."""
        states = self.encoder(embedded, lengths)
        return states, length_mask(lengths, states.shape[1], states)

    def _decide(self, context: Tensor) -> Tensor:
        return self.output(self.dropout(context))

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits ``[B, C]`` of ``words [B, n]`` with ``lengths [B]``.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_ids("words", words)
        check_lengths(lengths, words, whose="words")
        if self.pooling != "max":
            return self.read(self.embed(words), lengths)(None)[0]
        states, exists = self._states(self.embed(words), lengths)
        return self._decide(states.masked_fill(~exists.unsqueeze(-1), -torch.inf).amax(1))
