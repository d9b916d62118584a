"""Which words a search may append to a hypothesis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnfast._utils.checks import (
    MAX_INT32,
    InputError,
    argument_message,
    check_array,
    check_int,
    check_range,
    describe,
    is_int,
    raise_type_error,
)
from attnfast.ops.copying import LOWEST
from attnfast.ops.operators import accumulation_dtype

#: The ids that every vocabulary of this package starts with.
PAD, UNK, BOS, EOS = range(4)


def output_limit(lengths: Tensor, ratio: float = 2.0, longest: int = 0) -> Tensor:
    r"""Return the most words, the end included, of translations of ``lengths [B]`` words.

    .. math:: \max(\lfloor r n \rfloor + 10, \text{longest})
    """
    check_array("lengths", lengths, "int64 or int32", ("B",))
    check_range("lengths", lengths, 0, MAX_INT32, "lengths")
    return ((ratio * lengths.cpu().double()).long() + 10).clamp_min(longest)


def check_count(name: str, count: object, least: int = 1) -> None:
    """Raise InputError unless ``count`` is an integer of at least ``least``."""
    try:
        check_int(name, count, least)
    except ValueError as error:
        raise InputError(str(error)) from None


class Constraints(NamedTuple):
    """The words that may come next.

    ``limits [B]``: the most words of each sentence's hypotheses, the end included; ``prefix
    [B, P]``: the words of the first steps, −1 for any; ``word_mask [1 or B, V]``, False where a
    word may not come; ``num_oov`` the number of words that only sources have; the others as in
    :func:`attnfast.decoding.beam_search`.
    """

    limits: Tensor
    start: int = BOS
    end: int = EOS
    forbidden: tuple[int, ...] = (PAD, UNK, BOS)
    word_mask: Tensor | None = None
    prefix: Tensor | None = None
    min_length: int = 0
    no_repeat_ngram: int = 0
    num_oov: int = 0

    def on(self, device: torch.device) -> Constraints:
        """Return the constraints with their tensors on a device."""
        tensors: dict[str, Any] = {
            k: x.to(device) for k, x in self._asdict().items() if isinstance(x, Tensor)
        }
        return self._replace(**tensors)

    def check_words(self, V: int) -> None:
        """Raise InputError unless start, end and prefix are among V words.

        Start and prefix may have words that only sources have.
        """
        words = V + self.num_oov
        for name, word, most in (("start", self.start, words), ("end", self.end, V)):
            if word >= most:
                raise InputError(argument_message(name, f"a word below {most}", word))
        if self.prefix is not None and self.prefix.numel():
            last = int(self.prefix.max())
            if last >= words:
                raise InputError(argument_message("prefix", f"of words below {words}", last))

    def for_operator(self, V: int) -> dict[str, Any]:
        """Return the arguments of the operator ``search`` that constrain words."""
        mask = torch.ones(1, V, dtype=torch.bool, device=self.limits.device)
        if self.word_mask is not None:
            mask = self._padded_mask(V)  # a copy
        mask[:, [word for word in self.forbidden if word < V]] = False
        return {
            "word_mask": mask, "prefix": self.prefix, "min_length": self.min_length,
            "no_repeat_ngram": min(self.no_repeat_ngram, MAX_INT32),
        }  # fmt: skip

    def log_probs(
        self, logits: Tensor, words: Tensor, sentence: Tensor, other: Tensor | None, share: float
    ) -> Tensor:
        """Return the log-probabilities ``[R, V]`` of the next word, −∞ where none may come.

        Probabilities of words that are neither forbidden nor masked add up to 1; the other rules
        take words away, and leave the rest as they are.

        Args:
            logits: ``[R, V]``, or log-probabilities of a pointer-generator.
            words: the hypotheses so far, ``[R, 1 + t]``, the start included.
            sentence: the number of each hypothesis's sentence, ``[R]``.
            other: log-probabilities of a scorer, or None.
            share: λ of (1 − λ) · own + λ · other.
        """
        V = logits.shape[-1]
        if words.shape[1] == 1:
            self.check_words(V - self.num_oov)
        is_end = torch.arange(V, device=logits.device) == self.end
        # Impossible words of a pointer-generator, including the unknown words of other sentences.
        logits = logits.masked_fill(logits == LOWEST, -math.inf)
        logits = logits.to(accumulation_dtype(logits.dtype))
        for word in self.forbidden:
            if word < V:  # a list of them would be copied to a GPU
                logits[:, word] = -math.inf
        if self.word_mask is not None:
            mask = self._padded_mask(V)
            mask = mask if len(mask) == 1 else mask[sentence]
            logits = logits.masked_fill(~mask, -math.inf)
        none = (logits == -math.inf).all(-1, keepdim=True)
        log_probs = logits.log_softmax(-1).masked_fill(none, -math.inf)
        if other is not None:
            mixed = (1 - share) * log_probs + share * other
            log_probs = mixed.masked_fill(log_probs == -math.inf, -math.inf)
        return log_probs.masked_fill(self._hidden(words, sentence, is_end), -math.inf)

    def _padded_mask(self, V: int) -> Tensor:
        """Return the mask of words, and True for copied words, ``[1 or B, V]``."""
        mask = self.word_mask
        assert mask is not None
        if mask.shape[-1] not in (V, V - self.num_oov):
            numbers = " or ".join(str(x) for x in dict.fromkeys((V - self.num_oov, V)))
            expected = f"[V] or [B, V] with V = {numbers}, the number of words"
            raise InputError(argument_message("word_mask", expected, f"V = {mask.shape[-1]}"))
        return F.pad(mask, (0, V - mask.shape[-1]), value=True)

    def _hidden(self, words: Tensor, sentence: Tensor, is_end: Tensor) -> Tensor:
        """Return where the rules that depend on the hypothesis forbid a word, ``[R, V]``."""
        length = words.shape[1] - 1
        hidden = (self.limits[sentence] <= length + 1).unsqueeze(-1) & ~is_end
        if length < self.min_length:
            hidden |= is_end
        if self.no_repeat_ngram:
            hidden |= repeated_ngrams(words[:, 1:], self.no_repeat_ngram, len(is_end), length)
        if self.prefix is not None and length < self.prefix.shape[1]:
            forced = self.prefix[sentence, length].unsqueeze(-1)
            another = torch.arange(len(is_end), device=words.device) != forced
            hidden = torch.where(forced >= 0, another, hidden)
        return hidden


def repeated_ngrams(words: Tensor, n: int, V: int, length: int) -> Tensor:
    """Return where a word would repeat an n-gram of ``words[:, :length]``, boolean ``[R, V]``."""
    repeated = words.new_zeros(len(words), V, dtype=torch.int32)
    if n > length:
        return repeated > 0
    words = words[:, :length]
    ngrams = words.unfold(1, n, 1)  # [R, length − n + 1, n]
    same = (ngrams[..., :-1] == words[:, length - n + 1 :].unsqueeze(1)).all(-1)
    return repeated.scatter_add_(1, ngrams[..., -1], same.int()) > 0


def make_constraints(
    model: Any,
    lengths: Tensor,
    *,
    start: int,
    end: int,
    forbidden: Sequence[int],
    word_mask: Tensor | None,
    prefix: Sequence[Sequence[int]] | None,
    min_length: int,
    max_length: int | None,
    no_repeat_ngram: int,
) -> Constraints:
    """Check the options of a search that limit its words; the limits stay on the CPU.

    Raises:
        InputError, TypeError: an option does not fit; the message names it.
    """
    B = len(lengths)
    for name, count in (("min_length", min_length), ("no_repeat_ngram", no_repeat_ngram)):
        check_count(name, count, 0)
    if min_length >= MAX_INT32:
        raise InputError(argument_message("min_length", f"below {MAX_INT32}", min_length))
    for name, word in (("start", start), ("end", end)):
        check_count(name, word, 0)
    listed = isinstance(forbidden, Sequence) and not isinstance(forbidden, (str, bytes))
    if not listed or not all(is_int(x) and x >= 0 for x in forbidden):
        raise_type_error("forbidden", "a list of word ids", describe(forbidden))
    if end in forbidden:
        raise InputError(argument_message("forbidden", f"without the end, {end}", list(forbidden)))
    if max_length is not None:
        check_count("max_length", max_length)
        if max_length >= MAX_INT32:
            raise InputError(argument_message("max_length", f"below {MAX_INT32}", max_length))
        if max_length < min_length:
            expected = f"at least min_length, {min_length}"
            raise InputError(argument_message("max_length", expected, max_length))
    if word_mask is not None:
        check_array("word_mask", word_mask, "boolean", ("V",), (B, "V"))
        word_mask = word_mask.unsqueeze(0) if word_mask.dim() == 1 else word_mask
    table = None
    if prefix is not None:
        table = _prefix_table(prefix, B, max_length, {*forbidden, end})
    return Constraints(
        search_limits(model, lengths, min_length, max_length, prefix), start, end,
        tuple(forbidden), word_mask, table, min_length, no_repeat_ngram,
    )  # fmt: skip


def search_limits(
    model: Any,
    lengths: Tensor,
    min_length: int = 0,
    max_length: int | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the most words of each sentence's hypotheses, the end included, ``[B]`` on the CPU."""
    if max_length is None:
        limits = getattr(model, "output_limit", output_limit)(lengths).cpu().long()
    else:
        limits = torch.full((len(lengths),), max_length + 1)
    least = torch.tensor([len(words) + 1 for words in prefix] if prefix else [1])
    return torch.maximum(limits, least).clamp_min(min_length + 1)


def _prefix_table(
    prefix: Sequence[Sequence[int]], B: int, max_length: int | None, excluded: set[int]
) -> Tensor:
    """Return the prefixes as ``[B, P]``, −1 after each."""
    listed = isinstance(prefix, (list, tuple)) and all(isinstance(x, (list, tuple)) for x in prefix)
    every = [word for words in prefix for word in words] if listed else []
    if not listed or not all(is_int(word) and 0 <= word <= MAX_INT32 for word in every):
        raise_type_error("prefix", "a list of word ids for each sentence", describe(prefix))
    if len(prefix) != B:
        raise InputError(argument_message("prefix", f"of {B} sentences", len(prefix)))
    for words in prefix:
        if max_length is not None and len(words) > max_length:
            expected = f"of at most max_length = {max_length} words"
            raise InputError(argument_message("prefix", expected, len(words)))
        if wrong := [word for word in words if word in excluded]:
            raise InputError(argument_message("prefix", "of words that may come", wrong[0]))
    longest = max((len(words) for words in prefix), default=0)
    rows = [[*words, *[-1] * (longest - len(words))] for words in prefix]
    return torch.tensor(rows, dtype=torch.long).view(B, longest)
