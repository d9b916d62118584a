"""Pointer-generators: a word of the vocabulary or a word of the source."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnfast._utils.checks import check_whole, describe, refuse, shape_of
from attnfast.functional import copy_distribution
from attnfast.ops.arguments import check_like, check_tensor
from attnfast.ops.backends import check_backend


class PointerGenerator(nn.Module):
    r"""The distribution over words to generate and words to copy, and the choice between both.

    .. math:: p_t = \sigma(W x_t + b), \quad
              P_{tw} = p_t\, \mathrm{softmax}(\ell_t)_w + (1 - p_t) \sum_{i:\, s_i = w} \alpha_{ti}

    Args:
        feature_dims: sizes of what the choice depends on, side by side in x: context, state and
            input of the decoder in the paper.
        backend: as in :func:`attnfast.copy_distribution`.

    Paper: See, Liu and Manning, ACL 2017, arXiv:1704.04368.
    """

    def __init__(self, *feature_dims: int, backend: str | None = None):
        super().__init__()
        if not feature_dims:
            refuse("feature_dims", "one size or more", "none")
        for size in feature_dims:
            check_whole("feature_dims", size)
        check_backend(backend)
        self.gate = nn.Linear(sum(feature_dims), 1)
        self.backend = backend

    def forward(
        self,
        logits: Tensor,
        weights: Tensor,
        source: Tensor,
        *features: Tensor,
        extra_words: int = 0,
        log: bool = True,
    ) -> Tensor:
        """Return ``[B, Tq, V + X]``: log-probabilities, or probabilities.

        Args:
            logits: ``[B, Tq, V]``; or ``[B, V]`` for one step, and so on below.
            weights: ``[B, Tq, Tk]``, of the attention.
            source: ``[B, Tk]``, the word at every key, from V on where the vocabulary lacks it.
            features: ``[B, Tq, ·]``, what the choice depends on.
            extra_words: X, how many words beyond the vocabulary the sources of the batch bring.
            log: return logarithms.
        """
        check_tensor("logits", logits)
        check_tensor("weights", weights)
        step, rows = logits.dim() == 2, logits.shape[:-1]
        if weights.dim() != logits.dim():
            refuse("weights", f"{shape_of(*rows, 'Tk')} to fit the logits", describe(weights))
        for x in features:
            check_tensor("features", x)
            if x.shape[:-1] != rows or x.device != logits.device:
                expected = f"{shape_of(*rows, '·')} on {logits.device} to fit the logits"
                refuse("features", expected, f"{describe(x)} on {x.device}")
            check_like("features", x, self.gate.weight)
        sizes = [x.shape[-1] for x in features]
        if sum(sizes) != self.gate.in_features:
            refuse("features", f"{self.gate.in_features} in all to fit the module", sizes)
        gate = self.gate(torch.cat(features, -1)).squeeze(-1)
        if step:
            logits, weights, gate = (x.unsqueeze(1) for x in (logits, weights, gate))
        out = copy_distribution(
            logits, weights, source, gate, extra_words=extra_words, log=log, backend=self.backend
        )
        return out.squeeze(1) if step else out
