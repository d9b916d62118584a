"""End-to-end memory networks: a story of sentences, a question, and hops between the two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_device,
    check_flag,
    check_tensor,
    describe,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.models._checks import PAD, check_ids
from attnfast.nn import MultiHopAttention
from attnfast.nn.attention import check_sizes
from attnfast.ops.operators import accumulation_dtype


class MemoryNetworkOutput(NamedTuple):
    """Output of :class:`MemoryNetwork`.

    Attributes:
        logits: of the answer, ``[B, V]``.
        weights: attention weights of the sentences at each hop, ``[B, K, S]``, or None.

    Example:
        >>> model = attnfast.models.MemoryNetwork(vocab_size=50, dim=8, hops=2)
        >>> answer = model(torch.randint(4, 50, (2, 6, 5)), torch.randint(4, 50, (2, 3)))
        >>> answer.logits.argmax(-1).shape, answer.weights
        (torch.Size([2]), None)
    """

    logits: Tensor
    weights: Tensor | None = None


def position_encoding(words: Tensor, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Return the factors of each word's embedding in the sum over the words.

    .. math:: l_{kj} = (1 - j / J) - (k / d) (1 - 2 j / J)

    for the j-th of J words and the k-th of d features, from 1 on. The sum then depends on the
    order of the words.

    Args:
        words: ``[.., L]``, padded with 0 at the end.
        features: d.
        dtype: of the result.

    Returns:
        ``[.., L, d]``; 0 for padding, whose embedding may have any finite value.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Example:
        >>> words = torch.tensor([[4, 5, 0], [6, 7, 8]])
        >>> attnfast.models.position_encoding(words, features=4).shape
        torch.Size([2, 3, 4])
    """
    check_tensor("words", words)
    if words.dtype not in (torch.int64, torch.int32) or not words.dim():
        raise_value_error("words", "word ids [.., L], int64 or int32", describe(words))
    check_device("words", words)
    check_sizes(features=features)
    j, k = (
        torch.arange(1, n + 1, dtype=accumulation_dtype(dtype), device=words.device)
        for n in (words.shape[-1], features)
    )
    there = words != PAD
    share = (j / there.sum(-1, keepdim=True).clamp_min(1)).unsqueeze(-1)
    weights = (1 - share) - k / features * (1 - 2 * share)
    return (weights * there.unsqueeze(-1)).to(dtype)


class MemoryNetwork(Module):
    r"""An end-to-end memory network: it answers a question about a story in one word.

    .. math:: m_i = \sum_j l_j \circ A x_{ij} + T^A_i, \quad
              c_i = \sum_j l_j \circ C x_{ij} + T^C_i, \quad
              u^1 = \sum_j l_j \circ B q_j, \quad
              P(a) = \mathrm{softmax}(W u^{K+1})

    with l the :func:`position_encoding`, T a learned vector for the position of a sentence, counted
    from the last, and :math:`u^{K+1}` the output of :class:`attnfast.nn.MultiHopAttention`. With
    adjacent tying there are K + 1 embeddings: the values of a hop are the keys of the next, B is
    the first, and W the last. With layer-wise tying A, B, C and W are separate.

    Args:
        vocab_size: V; 0 is padding.
        dim: features d.
        hops: K.
        tying: ``"adjacent"`` or ``"layer-wise"``.
        max_sentences: largest number of sentences of a story.
        backend: as in :func:`attnfast.dot_attention`.

    Paper: Sukhbaatar et al., "End-To-End Memory Networks", NeurIPS 2015, arXiv:1503.08895.

    Example:
        >>> model = attnfast.models.MemoryNetwork(vocab_size=50, dim=8, hops=2)
        >>> stories, questions = torch.randint(4, 50, (2, 6, 5)), torch.randint(4, 50, (2, 3))
        >>> logits, weights = model(stories, questions, need_weights=True)
        >>> logits.shape, weights.shape
        (torch.Size([2, 50]), torch.Size([2, 2, 6]))
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int = 32,
        hops: int = 3,
        tying: str = "adjacent",
        max_sentences: int = 50,
        backend: str | None = None,
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, max_sentences=max_sentences)
        self.attention = MultiHopAttention(dim, hops, tying, backend)
        many = hops + 1 if tying == "adjacent" else 2
        self.dim, self.max_sentences = dim, max_sentences
        self.embeddings = nn.ModuleList(
            nn.Embedding(vocab_size, dim, padding_idx=PAD) for _ in range(many)
        )
        self.places = nn.Parameter(torch.empty(many, max_sentences, dim).normal_(std=0.1))
        self.question: Any = self.embeddings[0]
        if tying == "layer-wise":
            self.question = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        for layer in self.modules():
            if isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=0.1)
                with torch.no_grad():
                    layer.weight[PAD] = 0
        nn.init.normal_(self.output.weight, std=0.1)
        last: Any = self.embeddings[-1]
        if tying == "adjacent":
            self.output.weight = last.weight

    def extra_repr(self) -> str:
        """Return the sizes."""
        return repr_fields(self, ("dim", "max_sentences"))

    def forward(
        self, stories: Tensor, questions: Tensor, need_weights: bool = False
    ) -> MemoryNetworkOutput:
        """Return the logits of the answers to questions.

        Args:
            stories: ``[B, S, L]``, int64, word ids; sentences and their words padded with 0 at the
                end. A sentence without words counts if others follow it.
            questions: ``[B, L']``, padded with 0.
            need_weights: return the weights of sentences too.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_flag("need_weights", need_weights)
        for name, words, axes in (("stories", stories, 3), ("questions", questions, 2)):
            check_tensor(name, words)
            check_device(name, words, self.places, "the module")
            if words.dim() != axes:
                raise_value_error(name, f"of {axes} axes", describe(words))
            check_ids(name, words.flatten(1), self.question.num_embeddings)
        if stories.shape[0] != questions.shape[0]:
            raise_value_error(
                "questions", f"{stories.shape[0]}, one of each of the stories", questions.shape[0]
            )
        order = torch.arange(1, stories.shape[1] + 1, device=stories.device)
        last = (stories != PAD).any(-1) * order
        lengths = nn.functional.pad(last, (1, 0)).amax(-1)
        if stories.shape[1] > self.max_sentences:
            raise_value_error(
                "stories", f"of {self.max_sentences} sentences at most", stories.shape[1]
            )
        position = lengths.unsqueeze(-1) - 1 - torch.arange(stories.shape[1], device=stories.device)
        order = position_encoding(stories, self.dim, self.places.dtype)
        sources = [
            (embedding(stories) * order).sum(-2) + vectors[position.clamp_min(0)]
            for embedding, vectors in zip(self.embeddings, self.places)
        ]
        memory = self.attention.prepare(sources, lengths)
        factors = position_encoding(questions, self.dim, self.places.dtype)
        query = (self.question(questions) * factors).sum(-2)
        output, weights = self.attention(query, memory, need_weights)
        return MemoryNetworkOutput(self.output(output), weights)
