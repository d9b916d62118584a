"""Attention weights as an output: pointer networks and the pointer-generator's copying."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnfast._utils.checks import (
    check_array,
    check_flag,
    check_int,
    check_like,
    check_tensor,
    describe,
    raise_value_error,
    shape_of,
)
from attnfast._utils.module import Module
from attnfast._utils.representation import repr_fields
from attnfast.decoding import Memory, check_memory
from attnfast.functional import copy_distribution
from attnfast.nn._fused_rnn import run_rnn
from attnfast.nn.attention import BahdanauAttention, check_sizes, refuse_script
from attnfast.ops.arguments import length_mask
from attnfast.ops.backends import check_backend
from attnfast.ops.reference import score


class PointerNetwork(Module):
    r"""An LSTM encoder of items, and an LSTM decoder that points at one item per step.

    .. math:: h_1 \dots h_N = \mathrm{LSTM}(x_1 \dots x_N), \quad
              s_t = \mathrm{LSTM}(x_{y_{t-1}}, s_{t-1}), \quad s_0 = h_N

    .. math:: e_{tj} = w^\top \tanh(W_q s_t + W_k h_j), \quad
              P(y_t = j) = \mathrm{softmax}_j(e_{tj}), \quad j = 0 \dots N

    The decoder chooses the length of an answer: it ends by pointing at :math:`h_0`, a learned state
    before the items, and begins by reading :math:`x_0`, a learned item. A pointer is 0 for the
    end and i for the i-th item, counted from 1. All steps of a given answer attend in one call. The
    log-probability of a very small weight is computed from its score, so that it and its gradient
    are exact even if the weight underflows to 0.

    Args:
        item_dim: features F of an item.
        hidden_dim: features of both LSTMs' states.
        attn_dim: features of the space in which states are compared.
        backend: as in :func:`attnfast.additive_attention`.

    Paper: Vinyals, Fortunato and Jaitly, "Pointer Networks", NeurIPS 2015, arXiv:1506.03134.

    Example:
        >>> network = attnfast.nn.PointerNetwork(item_dim=2, hidden_dim=8, attn_dim=8)
        >>> items, lengths = torch.randn(3, 6, 2), torch.tensor([6, 5, 4])
        >>> pointers = torch.tensor([[1, 3, 0], [2, 0, 0], [4, 1, 0]])  # 0 is the end
        >>> network(items, lengths, pointers).shape
        torch.Size([3, 3, 7])
    """

    def __init__(self, item_dim: int, hidden_dim: int, attn_dim: int, backend: str | None = None):
        super().__init__()
        check_sizes(item_dim=item_dim, hidden_dim=hidden_dim, attn_dim=attn_dim)
        self.encoder = nn.LSTM(int(item_dim), int(hidden_dim), batch_first=True)
        self.decoder = nn.LSTM(int(item_dim), int(hidden_dim), batch_first=True)
        self.attention = BahdanauAttention(hidden_dim, hidden_dim, attn_dim, backend=backend)
        self.start = nn.Parameter(torch.empty(item_dim))
        self.end = nn.Parameter(torch.empty(hidden_dim))
        for x in (self.start, self.end):
            nn.init.uniform_(x, -1, 1)

    def _check(self, items: Any, lengths: Any) -> None:
        check_tensor("items", items)
        F = self.encoder.input_size
        if items.dim() != 3 or items.shape[-1] != F or not items.numel():
            raise_value_error("items", f"[B, N, {F}] with an item at least", list(items.shape))
        check_like("items", items, self.start)
        B, N, _ = items.shape
        check_array("lengths", lengths, "int64 or int32", (B,), of="items")
        for length in lengths.tolist():
            if not 1 <= length <= N:
                raise_value_error("lengths", f"between 1 and {N}, the items", length)

    def encode(self, items: Tensor, lengths: Tensor) -> tuple[Memory, tuple[Tensor, Tensor]]:
        """Encode items; return the memory that pointers attend to, and the decoder's first state.

        Args:
            items: ``[B, N, F]``; finite values in the padding are ignored.
            lengths: ``[B]``, int64 or int32, from 1 to N.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        self._check(items, lengths)
        there = lengths.to(items.device).long()
        read = run_rnn(self.encoder, items, None, there, self.attention.backend)
        if read is None:
            packed = pack_padded_sequence(items, lengths.cpu(), True, False)
            packed, last = self.encoder(packed)
            states, _ = pad_packed_sequence(packed, True, total_length=items.shape[1])
        else:
            states, last = read
        states = torch.cat([self.end.to(states).expand(len(items), 1, -1), states], 1)
        return self.attention.prepare(states, there + 1), last

    def point(self, states: Tensor, memory: Memory) -> Tensor:
        """Return the log-probabilities of pointers ``[B, T, 1 + N]``, −inf for padding.

        Args:
            states: ``[B, T, hidden_dim]``, of the decoder.
            memory: from :meth:`encode`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_array("states", states, "floating-point", ("B", "T", self.encoder.hidden_size))
        check_memory(memory)
        check_like("states", states, self.start)
        if states.shape[0] != memory.key.shape[0]:
            raise_value_error(
                "states", f"of {memory.key.shape[0]} sequences, as memory", states.shape[0]
            )
        attended = self.attention(states, memory, need_weights=True)
        weights, total = attended.weights, attended.log_sum_exp
        assert weights is not None and total is not None
        faint = torch.finfo(weights.dtype).tiny ** 0.5
        weights = weights.to(total.dtype)
        assert memory.lengths is not None
        visible = length_mask(memory.lengths, weights.shape[-1]).unsqueeze(1)
        b, t, j = (visible & (weights < faint)).nonzero(as_tuple=True)
        asked = self.attention.query_proj(states[b, t]), memory.key[b, j]
        query, key = (x.unsqueeze(1).to(total.dtype) for x in asked)
        e = score(query, key, memory.score_vector, memory.score).flatten()
        log_probs = weights.clamp_min(faint).log()  # its gradient is 0 for faint weights
        log_probs = log_probs.index_put((b, t, j), e - total[b, t])
        return log_probs.masked_fill(~visible, -math.inf)

    def _read(self, items: Tensor, pointers: Tensor) -> Tensor:
        """Return the decoder's inputs after ``pointers [B, T]``: the start item after 0."""
        rows = torch.arange(len(items), device=items.device).unsqueeze(-1)
        chosen = items[rows, (pointers - 1).clamp_min(0)]
        return torch.where(pointers.unsqueeze(-1) > 0, chosen, self.start.to(items))

    def forward(self, items: Tensor, lengths: Tensor, pointers: Tensor) -> Tensor:
        """Return the log-probability of every pointer at every step of given answers.

        Args:
            items: ``[B, N, F]``; finite values in the padding are ignored.
            lengths: ``[B]``, int64 or int32, from 1 to N.
            pointers: ``[B, T]``, int64: 0 for the end, i for the i-th item, padded with 0.

        Returns:
            ``[B, T, 1 + N]``, float32 for half precision; −inf for padding. Row t has read the
            pointers before the t-th; rows after an end are undefined.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        memory, state = self.encode(items, lengths)
        B = len(items)
        check_array("pointers", pointers, "int64", (B, "T"), of="items")
        if not pointers.numel():
            raise_value_error(
                "pointers", f"int64 of shape [{B}, T], T at least 1", describe(pointers)
            )
        beyond = (pointers < 0) | (pointers > lengths.to(pointers.device).unsqueeze(-1))
        if beyond.any():
            got = int(pointers[beyond][0])
            raise_value_error("pointers", "from 0, the end, to the number of a row's items", got)
        before = nn.functional.pad(pointers.to(items.device), (1, -1))
        states, _ = self.decoder(self._read(items, before), state)
        return self.point(states, memory)

    @torch.no_grad()
    def decode(self, items: Tensor, lengths: Tensor, distinct: bool = False) -> Tensor:
        """Decode greedily: each pointer is the most probable one after the previous ones.

        Args:
            items: ``[B, N, F]``; finite values in the padding are ignored.
            lengths: ``[B]``, int64 or int32, from 1 to N.
            distinct: do not point at an item twice.

        Returns:
            Pointers ``[B, T]``, int64: 0 for the end, i for the i-th item, padded with 0. An answer
            has at most as many pointers as there are items.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_flag("distinct", distinct)
        memory, state = self.encode(items, lengths)
        lengths, answer = lengths.to(items.device), []
        last = lengths.new_zeros(len(items), dtype=torch.int64)
        ended = last > 0
        barred = ended.new_zeros(len(items), 1 + items.shape[1])
        for step in range(int(lengths.max())):
            states, state = self.decoder(self._read(items, last.unsqueeze(1)), state)
            log_probs = self.point(states, memory).squeeze(1).masked_fill(barred, -math.inf)
            ended = ended | (step >= lengths)
            last = log_probs.argmax(-1).masked_fill(ended, 0)
            ended = last == 0
            answer.append(last)
            if ended.all():
                break
            if distinct:
                barred.scatter_(1, last.unsqueeze(1), True)
        return torch.stack(answer, 1)


class PointerGenerator(Module):
    r"""A mixture of generating words from the vocabulary and copying words of the source.

    .. math:: p_t = \sigma(W x_t + b), \quad
              P_{tw} = p_t\, \mathrm{softmax}(\ell_t)_w + (1 - p_t) \sum_{i:\, s_i = w} \alpha_{ti}

    Args:
        feature_dims: sizes of the features that are concatenated into x: in the paper context,
            state and input of the decoder.
        backend: as in :func:`attnfast.copy_distribution`.

    Paper: See, Liu and Manning, ACL 2017, arXiv:1704.04368.

    Example:
        >>> generator = attnfast.nn.PointerGenerator(6, 4)
        >>> logits, weights = torch.randn(2, 3, 10), torch.full((2, 3, 5), 0.2)
        >>> source = torch.randint(4, 10, (2, 5))
        >>> p = generator(logits, weights, source, torch.randn(2, 3, 6), torch.randn(2, 3, 4))
        >>> torch.allclose(p.exp().sum(-1), torch.ones(2, 3))  # log-probabilities
        True
    """

    __prepare_scriptable__ = refuse_script

    def __init__(self, *feature_dims: int, backend: str | None = None):
        super().__init__()
        if not feature_dims:
            raise_value_error("feature_dims", "one size or more", "none")
        for size in feature_dims:
            check_int("feature_dims", size)
        check_backend(backend)
        self.gate = nn.Linear(sum(feature_dims), 1)
        self.backend = backend

    def extra_repr(self) -> str:
        """Return the options that are not defaults."""
        return repr_fields(self, defaults={"backend": None})

    def forward(
        self,
        logits: Tensor,
        weights: Tensor,
        source: Tensor,
        *features: Tensor,
        num_oov: int = 0,
        log: bool = True,
    ) -> Tensor:
        """Return ``[B, Tq, V + X]``: log-probabilities, or probabilities.

        Args:
            logits: ``[B, Tq, V]``, or ``[B, V]`` for one step; the other arguments likewise.
            weights: ``[B, Tq, Tk]``, attention weights.
            source: ``[B, Tk]``, the word id at every key, V or more for out-of-vocabulary words.
            features: ``[B, Tq, ·]``, the features that x is concatenated from.
            num_oov: X, the number of out-of-vocabulary words in the sources of the batch.
            log: return logarithms.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        check_tensor("logits", logits)
        check_tensor("weights", weights)
        step, rows = logits.dim() == 2, logits.shape[:-1]
        if weights.dim() != logits.dim():
            raise_value_error(
                "weights", f"{shape_of(*rows, 'Tk')} to fit the logits", describe(weights)
            )
        for x in features:
            check_tensor("features", x)
            if x.shape[:-1] != rows or x.device != logits.device:
                expected = f"{shape_of(*rows, '·')} on {logits.device} to fit the logits"
                raise_value_error("features", expected, f"{describe(x)} on {x.device}")
            check_like("features", x, self.gate.weight)
        sizes = [x.shape[-1] for x in features]
        if sum(sizes) != self.gate.in_features:
            raise_value_error(
                "features", f"{self.gate.in_features} in all to fit the module", sizes
            )
        gate = self.gate(torch.cat(features, -1)).squeeze(-1)
        if step:
            logits, weights, gate = (x.unsqueeze(1) for x in (logits, weights, gate))
        out = copy_distribution(
            logits, weights, source, gate, num_oov=num_oov, log=log, backend=self.backend
        )
        return out.squeeze(1) if step else out
