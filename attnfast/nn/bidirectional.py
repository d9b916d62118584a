"""Attention of a text to a question and of the question to the text, from one score."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_device,
    check_flag,
    check_like,
    check_numbers,
    check_tensor,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.functional import dot_attention
from attnfast.nn.attention import check_sizes, refuse_script
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import check_backend


class BidirectionalAttention(Module):
    r"""Attention from each word of a text to a question, and from the question to the text.

    .. math:: e_{tj} = w_h \cdot h_t + w_u \cdot u_j + w \cdot (h_t \circ u_j)

    .. math:: \tilde u_t = \sum_j \mathrm{softmax}_j(e_{tj})\, u_j, \quad
              \tilde h = \sum_t \mathrm{softmax}_t(\max_j e_{tj})\, h_t, \quad
              g_t = [h_t;\, \tilde u_t;\, h_t \circ \tilde u_t;\, h_t \circ \tilde h]

    The score is a dot product of :math:`w \circ h_t` and :math:`u_j` with a bias for each word.
    Each row's largest score is the sum of its log-sum-exp and the logarithm of its largest weight,
    so that no tensor of text × question × features is made, nor one of text × question unless
    weights are requested.

    Args:
        dim: features d of the states of text and question.
        backend: as in :func:`attnfast.dot_attention`.

    Paper: Seo et al., "Bidirectional Attention Flow for Machine Comprehension", ICLR 2017,
    arXiv:1611.01603.

    Example:
        >>> attention = attnfast.nn.BidirectionalAttention(8)
        >>> lengths = torch.tensor([5, 3]), torch.tensor([4, 4])
        >>> attention(torch.randn(2, 5, 8), torch.randn(2, 4, 8), *lengths)[0].shape
        torch.Size([2, 5, 32])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(self, dim: int, backend: str | None = None):
        super().__init__()
        check_sizes(dim=dim)
        check_backend(backend)
        self.dim, self.backend = dim, backend
        bound = dim**-0.5
        self.weight = nn.Parameter(torch.empty(dim).uniform_(-bound, bound))
        self.text_proj = nn.Linear(dim, 1, bias=False)
        self.question_proj = nn.Linear(dim, 1, bias=False)

    def extra_repr(self) -> str:
        """Return the sizes, and the options that are not defaults."""
        return repr_fields(self, ("dim",), {"backend": None})

    def forward(
        self,
        text: Tensor,
        question: Tensor,
        text_lengths: Tensor | None = None,
        question_lengths: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Attend both ways.

        Args:
            text: h, ``[B, T, dim]``.
            question: u, ``[B, J, dim]``; padding of both is replaced by 0, including NaN.
            text_lengths, question_lengths: ``[B]``, the lengths without padding, at least 1.
            need_weights: return the weights too.

        Returns:
            g ``[B, T, 4 · dim]``, and None or the weights of both directions: ``[B, T, J]`` over
            the question's words for each word of the text, and ``[B, T]`` over the text's words.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_flag("need_weights", need_weights)
        read, beyond = [], {}
        for name, x, lengths in (
            ("text", text, text_lengths),
            ("question", question, question_lengths),
        ):
            check_tensor(name, x)
            if x.dim() != 3 or x.shape[-1] != self.dim or x.shape[0] != text.shape[0]:
                raise_value_error(name, f"[B, T, {self.dim}], as many as texts", list(x.shape))
            check_like(name, x, self.weight)
            if lengths is not None:
                check_device(f"{name}_lengths", lengths, x, name)
                check_numbers(f"{name}_lengths", lengths, text.shape[0], 1, x.shape[1], name)
                beyond[name] = ~length_mask(lengths, x.shape[1])
                x = x.masked_fill(beyond[name].unsqueeze(-1), 0)  # padding may be NaN
            read.append(x)
        if not question.shape[1]:
            raise_value_error("question", "of at least one word", list(question.shape))
        text, question = read
        result = dot_attention(
            self.weight * text, question, question, scale=1.0, lengths=question_lengths,
            bias=self.question_proj(question).mT, need_weights=bool(need_weights),
            need_statistics=True, backend=self.backend,
        )  # fmt: skip
        statistics, found = result.statistics, result.context
        assert statistics is not None and result.log_sum_exp is not None
        largest = result.log_sum_exp + statistics.max_weight.log()
        largest = largest.to(found.dtype) + self.text_proj(text).squeeze(-1)
        if "text" in beyond:
            largest = largest.masked_fill(beyond["text"], -torch.inf)
        share = largest.softmax(-1)
        pooled = share.unsqueeze(1) @ text
        both = torch.cat([text, found, text * found, text * pooled], -1)
        return both, None if result.weights is None else (result.weights, share)
