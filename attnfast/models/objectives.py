"""Losses of the reference models, and scheduled sampling."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_device,
    check_number,
    check_numbers,
    check_range,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast.models._checks import EOS, PAD, check_ids
from attnfast.models.las import LASOutput
from attnfast.ops.operators import accumulation_dtype

__all__ = ["hybrid_loss", "scheduled_sampling", "sequence_loss"]


def sequence_loss(logits: Tensor, target_out: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of ``logits [B, T, V]`` over words that are not padding.

    It is 0 where there are none, and in float32 for logits in half precision.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Example:
        >>> logits, target = torch.zeros(1, 2, 4), torch.tensor([[1, 3]])
        >>> attnfast.models.sequence_loss(logits, target).item() == torch.tensor(4.0).log().item()
        True
    """
    check_array("logits", logits, "floating-point", ("B", "T", "V"))
    *shape, V = logits.shape
    check_array("target_out", target_out, "int64", shape, like=logits, of="logits")
    check_range("target_out", target_out, 0, V - 1, "word ids")
    check_number("label_smoothing", label_smoothing, 0, 1)
    logits = logits.to(accumulation_dtype(logits.dtype))
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), target_out.flatten(), ignore_index=PAD,
        label_smoothing=label_smoothing, reduction="sum",
    )  # fmt: skip
    return total / (target_out != PAD).sum().clamp_min(1)


def hybrid_loss(
    output: LASOutput, target_out: Tensor, ctc_weight: float = 0.3, label_smoothing: float = 0.0
) -> Tensor:
    r"""Return :math:`(1 - \lambda)` times the decoder's loss and λ times CTC's, in nats a label.

    .. math:: \frac{1}{N} \sum_b -(1 - \lambda) \ln P(y_b \,\mathrm{end}) -
              \lambda \ln P_\mathrm{ctc}(y_b)

    The first part is :func:`sequence_loss`, whose mean counts the ends too. The second part is the
    CTC loss of the labels alone, the ids from 4 on, in float32 or wider. A text with more labels
    than its recording has states, counting the blanks needed between repeated labels, contributes 0
    to the second part, with a warning.

    Args:
        output: the output of :class:`attnfast.models.ListenAttendSpell`.
        target_out: ``[B, T]``, labels and the end, int64 or int32.
        ctc_weight: λ, from 0 to 1.
        label_smoothing: of the decoder's loss.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Paper: Watanabe et al., IEEE JSTSP 11(8), 2017.

    Example:
        >>> from attnfast.models import ListenAttendSpell, PyramidEncoder, hybrid_loss
        >>> attention = attnfast.nn.BahdanauAttention(query_dim=6, key_dim=8, attn_dim=4)
        >>> model = ListenAttendSpell(PyramidEncoder(5, 4, layers=1), attention, 20, 6, 3).eval()
        >>> frames, lengths = torch.randn(2, 8, 5), torch.tensor([8, 6])
        >>> output = model(frames, lengths, torch.tensor([[2, 7, 5], [2, 9, 0]]))
        >>> hybrid_loss(output, torch.tensor([[7, 5, 3], [9, 3, 0]]), ctc_weight=0.5).shape
        torch.Size([])
    """
    check_number("ctc_weight", ctc_weight, 0, 1)
    check_number("label_smoothing", label_smoothing, 0, 1)
    if not isinstance(output, LASOutput):
        raise_type_error("output", "an output of a ListenAttendSpell", describe(output))
    check_array("output.logits", output.logits, "floating-point", ("B", "T", "V"))
    B, _, V = output.logits.shape
    like, log_probs = output.logits, output.frame_log_probs
    check_array("output.frame_log_probs", log_probs, "floating-point", (B, "Tk", V), like=like)
    check_numbers("output.lengths", output.lengths, B, 0, log_probs.shape[1])
    check_device("target_out", target_out, like, "output.logits")
    check_ids("target_out", target_out, V)
    for name, x in (("output.logits", like), ("output.frame_log_probs", log_probs)):
        if 0 in x.shape:
            raise_value_error(name, "of one text and one step at least", describe(x))
    shape = list(like.shape[:2])
    if list(target_out.shape) != shape:
        raise_value_error(
            "target_out", f"word ids {shape}, as the logits of output", describe(target_out)
        )
    target_out = target_out.long()
    loss = output.logits.new_zeros(())
    if ctc_weight < 1:
        own = sequence_loss(output.logits, target_out, label_smoothing)
        loss = loss + (1 - ctc_weight) * own
    if ctc_weight:
        counts = (target_out > EOS).sum(-1)
        first = (target_out <= EOS).int().sort(stable=True).indices  # labels before all else
        labels = target_out.gather(1, first)
        _warn_of_long_texts(labels, counts, output.lengths)
        log_probs = output.frame_log_probs.transpose(0, 1)
        paths = nn.functional.ctc_loss(
            log_probs.to(accumulation_dtype(log_probs.dtype)), labels,
            output.lengths, counts, blank=PAD, reduction="sum", zero_infinity=True,
        )  # fmt: skip
        loss = loss + ctc_weight * paths / counts.sum().clamp_min(1)
    return loss


def _warn_of_long_texts(labels: Tensor, counts: Tensor, states: Tensor) -> None:
    """Warn, once for each caller, if a text does not fit into its recording's states."""
    if torch.compiler.is_compiling():
        return
    pairs = torch.arange(1, labels.shape[1], device=labels.device) < counts.unsqueeze(-1)
    repeats = ((labels[:, 1:] == labels[:, :-1]) & pairs).sum(-1)
    if (counts + repeats > states.to(counts.device)).any():
        warnings.warn(
            "texts with more labels, and blanks between repeated ones, than their recordings have "
            "states count 0 in the CTC loss: join fewer frames, or leave these texts out",
            stacklevel=3,
        )


def scheduled_sampling(target_in: Tensor, logits: Tensor, share: float) -> Tensor:
    r"""Return ``target_in`` with a share of its words replaced by words drawn from a model.

    .. math:: \tilde y_t \sim \mathrm{softmax}(z_{t-1}) \text{ with probability } p,
              \text{ else } y_t

    The model first reads the true words, for ``logits``, and is then trained on the returned words:
    two passes over whole targets, whereas Bengio et al. loop over single steps. The four special
    ids, such as the start and padding, are never replaced or drawn.

    Args:
        target_in: ``[B, T]``, ids that begin with the start.
        logits: z, ``[B, T, V]``, of the word after each; no gradient goes through them.
        share: p, from 0 to 1.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.

    Papers: Bengio et al., "Scheduled Sampling for Sequence Prediction with Recurrent Neural
    Networks", NeurIPS 2015, arXiv:1506.03099; in two passes, Mihaylova and Martins, ACL 2019
    student workshop, arXiv:1906.07651.

    Example:
        >>> words, logits = torch.tensor([[2, 5, 6]]), torch.randn(1, 3, 9)
        >>> attnfast.models.scheduled_sampling(words, logits, share=0.0)
        tensor([[2, 5, 6]])
    """
    check_ids("target_in", target_in)
    shape = (*target_in.shape, "V")
    check_array("logits", logits, "floating-point", shape, like=target_in, of="target_in")
    check_range("target_in", target_in, 0, logits.shape[-1] - 1, "word ids")
    check_number("share", share, 0, 1)
    if not share or target_in.shape[1] < 2:
        return target_in
    before = logits.detach()[:, :-1]
    before = before.to(accumulation_dtype(before.dtype))
    words = before[..., EOS + 1 :].softmax(-1).flatten(0, 1).multinomial(1) + EOS + 1
    given = target_in[:, 1:]
    chances = torch.rand(given.shape, dtype=before.dtype, device=given.device)
    drawn = (chances < share) & (given > EOS)
    return torch.cat([target_in[:, :1], torch.where(drawn, words.view_as(given), given)], 1)
