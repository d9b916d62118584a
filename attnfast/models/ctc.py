"""CTC prefix scores for the hypotheses of a search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnfast._utils.checks import check_array, describe, raise_type_error
from attnfast.models._checks import EOS, check_ids
from attnfast.models.las import BLANK, EncodedSpeech
from attnfast.ops.arguments import length_mask

#: If the logarithm of a product of probabilities is smaller, it is too imprecise to divide by.
LEAST = -1e6


class PrefixState(NamedTuple):
    """State of :class:`CTCPrefixScorer` for hypotheses g, float64 log-probabilities.

    ``blank`` and ``label [R, T + 1]``: the probability of all paths of the first t states that
    spell g and end with a blank, or with its last label; ``scores [R, V]``: of g and each label,
    as a beginning, and of g alone at the end's id; ``last [R, 1]``, its last label.
    """

    blank: Tensor
    label: Tensor
    scores: Tensor
    last: Tensor

    def index_select(self, index: Tensor) -> PrefixState:
        """Return the state of the hypotheses ``index``."""
        return PrefixState(*(x[index] for x in self))


class CTCPrefixScorer:
    r"""A scorer of each label after a hypothesis by CTC, for :func:`attnfast.decoding.beam_search`.

    The prefix probability of g is that of all texts that begin with it. Let
    :math:`\gamma^n_t(g)` and :math:`\gamma^b_t(g)` be the probabilities that the first t states
    spell g and end with its last label, or with a blank:

    .. math:: \Phi_t(c) = \gamma^b_t(g) + [c \ne g_{-1}]\, \gamma^n_t(g), \quad
              \Psi(gc) = \sum_t \Phi_{t-1}(c)\, p_t(c), \quad
              \Psi(g\,\mathrm{end}) = \gamma^b_T(g) + \gamma^n_T(g)

    .. math:: \gamma^n_t(gc) = (\gamma^n_{t-1}(gc) + \Phi_{t-1}(c))\, p_t(c), \quad
              \gamma^b_t(gc) = (\gamma^b_{t-1}(gc) + \gamma^n_{t-1}(gc))\, p_t(\mathrm{blank})

    A step costs R · T · V for R hypotheses, T states and V labels. The recurrences of γ over the
    states are cumulative sums, all states at once.

    Papers: Graves, "Supervised Sequence Labelling with Recurrent Neural Networks", 2008, section
    7.5; Watanabe et al., IEEE JSTSP 11(8), 2017, algorithm 2.

    Example:
        >>> from attnfast.models import CTCPrefixScorer, ListenAttendSpell, PyramidEncoder
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> model = ListenAttendSpell(PyramidEncoder(5, 4, layers=1), attention, 20, 6, 3).eval()
        >>> frames, lengths = torch.randn(2, 8, 5), torch.tensor([8, 6])
        >>> scorer = CTCPrefixScorer()
        >>> found = attnfast.decoding.beam_search(model, frames, lengths, beam=2, scorer=scorer)
        >>> len(found.best)
        2
    """

    def score(
        self, words: Tensor, state: PrefixState | None, encoded: EncodedSpeech
    ) -> tuple[Tensor, PrefixState]:
        r"""Read the last word of every hypothesis, and score the next one.

        Args:
            words: ``[R, 1]``, the last words of the hypotheses.
            state: the state that the last call returned, or None if ``words`` are the start.
            encoded: the recordings, one for each hypothesis.

        Returns:
            :math:`\ln \Psi(gc) - \ln \Psi(g)`, ``[R, V]``, of the dtype of
            ``frame_log_probs``; and the state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        if not hasattr(encoded, "frame_log_probs"):
            got = type(encoded).__name__
            raise_type_error(
                "encoded", "of a model with frame_log_probs, as ListenAttendSpell's", got
            )
        log_p = encoded.frame_log_probs
        check_array("encoded.frame_log_probs", log_p, "floating-point", ("R", "T", "V"))
        R, T, V = log_p.shape
        log_p = log_p.double()
        check_array("words", words, "int64", (R, 1), like=log_p, of="encoded")
        check_ids("words", words, V)
        if not isinstance(state, (PrefixState, type(None))):
            raise_type_error("state", "a result of score(...), or None", describe(state))
        if state is not None:
            shapes = {"blank": (R, T + 1), "label": (R, T + 1), "scores": (R, V), "last": (R, 1)}
            for name, shape in shapes.items():
                kind = "int64" if name == "last" else "floating-point"
                x = getattr(state, name)
                check_array(f"state.{name}", x, kind, shape, like=log_p, of="encoded")
        if state is None:
            blank = _summed(log_p[..., BLANK])
            label = torch.full_like(blank, -torch.inf)
            total, last = blank.new_zeros(len(blank), 1), words
        else:
            last = words
            entering = torch.logaddexp(state.blank, state.label)
            entering = torch.where(words == state.last, state.blank, entering)
            label = _walked(entering, _of_label(log_p, words))
            blank = _walked(label, log_p[..., BLANK])
            total = state.scores.gather(-1, words)
        both = torch.logaddexp(blank, label)
        exists = length_mask(encoded.lengths, log_p.shape[1])
        log_p = log_p.masked_fill(~exists.unsqueeze(-1), -torch.inf)
        scores = (both[:, :-1].unsqueeze(-1) + log_p).logsumexp(1)
        again = blank[:, :-1] + _of_label(log_p, last)
        scores = scores.scatter(-1, last, again.logsumexp(1, keepdim=True))
        scores[:, EOS] = both.gather(-1, encoded.lengths.unsqueeze(-1)).squeeze(-1)
        gain = torch.where(total == -torch.inf, total, scores - total)
        return gain.to(encoded.frame_log_probs.dtype), PrefixState(blank, label, scores, last)


def _of_label(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return the elements ``[R, T]`` of ``log_p [R, T, V]`` for ``labels [R, 1]``."""
    return log_p.gather(-1, labels.unsqueeze(1).expand(-1, log_p.shape[1], 1)).squeeze(-1)


def _summed(x: Tensor) -> Tensor:
    """Return Σ_{s ≤ t} x_s for t from 0 to T, ``[R, T + 1]``."""
    return F.pad(x.cumsum(-1), (1, 0))


def _walked(entering: Tensor, log_p: Tensor) -> Tensor:
    """Return ln y of y_t = (y_{t−1} + a_{t−1}) p_t from y_0 = 0 on, ``[R, T + 1]``.

    ``entering [R, T + 1]`` is ln a, ``log_p [R, T]`` ln p. With P_t = Π_{s ≤ t} p_s it is
    y_t = P_t Σ_{s < t} a_s / P_s. If P is too small to divide by, the sums of 1, 2, 4, … states
    are combined.
    """
    product = _summed(log_p)
    if not (product > LEAST).all():
        y, product, size = entering[:, :-1] + log_p, log_p, 1
        while size < log_p.shape[1]:
            more = torch.logaddexp(y[:, size:], y[:, :-size] + product[:, size:])
            y = torch.cat([y[:, :size], more], 1)
            longer = product[:, size:] + product[:, :-size]
            product, size = torch.cat([product[:, :size], longer], 1), 2 * size
        return F.pad(y, (1, 0), value=-torch.inf)
    sums = (entering - product)[:, :-1].logcumsumexp(-1)
    return torch.cat([torch.full_like(sums[:, :1], -torch.inf), product[:, 1:] + sums], -1)
