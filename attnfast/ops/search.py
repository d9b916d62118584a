"""Search: a recurrent layer that attends and reads the words that continue its best hypotheses.

.. code-block:: text

    x_t = scale · embedding[y_{t−1}]
    h_t, c_t, f_t   from x_t, as in :mod:`attnfast.ops.recurrent`
    o_t = tanh(W_r [h_t; c_t; x_t] + b_r),  or f_t,  or the first R of [h_t; c_t; x_t]
    ℓ_t = W_v o_t + b_v
    P(y_t) = softmax(ℓ_t), or with copying as in :mod:`attnfast.ops.copying`, of the words in
             ``word_mask``, over their sum

Of the K hypotheses of a sentence with each word after them, the best 2K by Σ_t log P(y_t) + γ n, of
n words but the end, are taken at every step. Those of the first K that end are finished, with the
score of :func:`attnfast.decoding.beam_search`; the best K others go on. A sentence ends with its
limit, or when K have finished and no other scores more. A greedy search has a beam of 1. With
``numbers``, each of the K hypotheses goes on alone, by a word that its number draws, as in
:func:`attnfast.decoding.sample`.

This file is the contract, as :mod:`attnfast.ops.attention` is of attention without history.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnfast._utils.checks import check_exact, check_tensor, raise_value_error
from attnfast.ops.copying import check_words
from attnfast.ops.operators import ForwardOperator, implement
from attnfast.ops.recurrent import (
    GATES,
    WEIGHTS,
    RecurrentInputs,
    check_packed,
    dtype_of_weights,
    feed_size,
)
from attnfast.ops.recurrent import check as check_recurrent


class SearchInputs(NamedTuple):
    """The arguments of the operator, float32 or float64.

    ``embedding [V, E]`` of the words, ``weight_vocab [V, R]`` and ``bias_vocab [V]`` for their
    scores; ``weight_readout [R, H + Dv + E]``, or ``[R, H + Dv]`` for a readout that does not read
    the embedded word, and ``bias_readout [R]``. Without them the attentional vectors are scored,
    or, if there are none, the state, or state and context, or also the embedded word: R is H,
    H + Dv or H + Dv + E.
    Sequence b has at most ``limits [B]`` words, int64, the end included, and none has more than
    ``most``. ``begin`` is read first. ``beam``, K, ``n_best``, N, ``length_penalty``,
    ``length_bonus``, γ, ``coverage_penalty``, ``min_length``, ``no_repeat_ngram``, ``temperature``,
    ``top_k`` and ``top_p`` are those of :mod:`attnfast.decoding`. ``word_mask [1 or B, V + X]``,
    boolean, is False for words that may not come; their probabilities are 0. ``prefix [B, P]``,
    int64, are words of the first steps, −1 for any word. With an ``end`` of −1 no word ends: a
    hypothesis of a sentence has one word less than its limit, and no end. ``numbers [B, K, most]``,
    float64 in [0, 1), draw the words, with N = K.

    A pointer-generator copies the words ``source [B, Tk]`` of the keys, int64. X of them,
    ``num_oov``, are not in the vocabulary: their ids begin with V, and ``unknown`` is read for
    them. The gate of a row is ``weight_pointer [1, R]`` · o_t + ``bias_pointer [1]``, or with a
    ``weight_pointer [1, H + Dv + E]`` that of [h_t; c_t; x_t].

    ``int8`` rounds the weights of matrix products and their inputs to 8 bits: with s the largest
    magnitude of a row over 127, x · w ≈ s_x s_w Σ_k round(x_k / s_x) round(w_k / s_w). Columns of
    the input, the fed vector, the state and the context are rounded apart.

    The others are those of :class:`attnfast.ops.recurrent.RecurrentInputs`, which must have keys.
    With ``weight_ih [G·H, E]`` nothing is fed to the next step.
    """

    embedding: Tensor
    weight_vocab: Tensor
    limits: Tensor
    hidden: Tensor
    weight_ih: Tensor
    weight_hh: Tensor
    cell: Tensor | None = None
    feed: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    score_vector: Tensor | None = None
    weight_query: Tensor | None = None
    bias_query: Tensor | None = None
    weight_output: Tensor | None = None
    bias_output: Tensor | None = None
    weight_readout: Tensor | None = None
    bias_readout: Tensor | None = None
    bias_vocab: Tensor | None = None
    weight_pointer: Tensor | None = None
    bias_pointer: Tensor | None = None
    weight_ih_upper: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    key_bounds: Tensor | None = None
    key_exponentials: Tensor | None = None
    packed: Tensor | None = None
    word_mask: Tensor | None = None
    prefix: Tensor | None = None
    numbers: Tensor | None = None
    source: Tensor | None = None
    filters: Tensor | None = None
    projection: Tensor | None = None
    penalty: Tensor | None = None
    inverse_fertility: Tensor | None = None
    transition_prob: Tensor | None = None
    coverage: Tensor | None = None
    previous: Tensor | None = None
    mode: str = "gru"
    attends_first: bool = True
    scale: float = 1.0
    score: str = "dot"
    normalisation: str = "softmax"
    output_activation: str = "tanh"
    int8: bool = False
    embedding_scale: float = 1.0
    begin: int = 0
    end: int = 0
    unknown: int = 0
    num_oov: int = 0
    most: int = 0
    beam: int = 1
    n_best: int = 1
    length_penalty: float = 0.0
    length_bonus: float = 0.0
    coverage_penalty: float = 0.0
    min_length: int = 0
    no_repeat_ngram: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    need_weights: bool = False


class SearchOutputs(NamedTuple):
    """Output of ``search``: the N best hypotheses of each sentence, the best first, or those drawn.

    ``words [B, N, most]``, the end included, and ``word_scores``, their log-probabilities; both are
    0 after ``lengths [B, N]``, which are 0 where a sentence has fewer hypotheses. ``scores [B, N]``
    are −∞ for a hypothesis that no word could follow, without an end. Lengths of a sentence with
    NaN scores are −1. ``weights [B, N, most, Tk]``, of the attention that scored each word, are 0
    after the lengths; without ``need_weights``, they have the shape [0].
    """

    words: Tensor
    word_scores: Tensor
    lengths: Tensor
    scores: Tensor
    weights: Tensor


#: The widest beam of the operator.
MOST_BEAM = 64

#: The coverage penalty counts less coverage as this, whose logarithm is −87.
LEAST_COVERAGE = 2.0**-126

#: The most features of a product of 8-bit integers, whose sum has 32 bits.
MOST_BYTES = 2**16


def layer_of(call: SearchInputs, input: Tensor) -> RecurrentInputs:
    """Return the layer's call for inputs ``[B, T, E]``; if nothing is fed, feed weights are 0."""
    names = set(RecurrentInputs._fields) & set(SearchInputs._fields) - {"packed"}
    shared = {x: getattr(call, x) for x in names}
    layer = RecurrentInputs(input, **shared)
    if not call.attends_first and call.weight_ih.shape[-1] == call.embedding.shape[-1]:
        if call.feed is not None:
            raise_value_error("feed", "None where nothing is fed", "a tensor")
        zeros = call.weight_ih.new_zeros(call.weight_ih.shape[0], feed_size(layer))
        layer = layer._replace(weight_ih=torch.cat([call.weight_ih, zeros], 1))
    return layer


def reads_input(call: SearchInputs) -> bool:
    """Return whether the readout reads the embedded word."""
    weight, others = call.weight_readout, call.weight_hh.shape[-1] + call.value.shape[-1]  # type: ignore[union-attr]
    return weight is not None and weight.shape[-1:] != (others,)


def gate_reads_state(call: SearchInputs) -> bool:
    """Return whether the pointer-generator's gate reads state, context and embedded word."""
    weight, R = call.weight_pointer, call.weight_vocab.shape[1]
    return weight is not None and weight.shape[-1:] != (R,)


def check(call: SearchInputs) -> None:
    """Raise, in one sentence and before any computation, unless the arguments fit together."""
    above = "" if call.weight_ih_upper is None else "L, "
    for name, axes in (
        ("hidden", f"[{above}B, H]"), ("weight_hh", f"[{above}G·H, H]"),
        ("weight_ih", "[G·H, E + F]"), ("embedding", "[V, E]"), ("weight_vocab", "[V, R]"),
        ("limits", "[B]"), ("key", "[B, Tk, A]"), ("value", "[B, Tk, Dv]"),
    ):  # fmt: skip
        check_tensor(name, getattr(call, name))
        if getattr(call, name).dim() != axes.count(",") + 1:
            raise_value_error(name, axes, list(getattr(call, name).shape))
    if not 0 <= call.most < 2**31:
        raise_value_error("most", "at least 0 and below 2**31", call.most)
    if call.mode not in GATES:
        raise_value_error("mode", f"one of {', '.join(GATES)}", call.mode)
    if call.bias_readout is not None and call.weight_readout is None:
        raise_value_error("bias_readout", "None without weight_readout", "a tensor")
    (B, H), (V, E), R = call.hidden.shape[-2:], call.embedding.shape, call.weight_vocab.shape[1]
    Dv, dtype = call.value.shape[-1], call.hidden.dtype  # type: ignore[union-attr]
    check_recurrent(layer_of(call, call.hidden.new_empty(B, call.most, E)))
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (V, E), "weight_vocab": (V, R), "bias_vocab": (V,),
        "weight_readout": (R, H + Dv + (E if reads_input(call) else 0)), "bias_readout": (R,),
    }  # fmt: skip
    for name, shape in shapes.items():
        wanted = dtype_of_weights(call) if name in WEIGHTS else dtype
        check_exact(call.hidden, [(name, getattr(call, name), wanted, shape)])
    check_exact(call.hidden, [("limits", call.limits, torch.int64, (B,))])
    if call.weight_readout is None:
        joined = (H, H + Dv, H + Dv + E)
        sizes = joined if call.weight_output is None else call.weight_output.shape[:1]
        if R not in sizes:
            expected = " or ".join(f"[V, {size}]" for size in dict.fromkeys(sizes))
            raise_value_error("weight_vocab", expected, [V, R])
    if call.mask is not None and call.mask.shape[1] != 1:
        raise_value_error("mask", "[B, 1, Tk], the same at all steps", list(call.mask.shape))
    for name, least, most in (("beam", 1, MOST_BEAM), ("n_best", 1, call.beam)):
        if not least <= getattr(call, name) <= most:
            raise_value_error(name, f"between {least} and {most}", getattr(call, name))
    _check_copying(call)
    if call.packed is not None:
        check_packed(call.packed, call.hidden)
    if call.int8 and dtype == torch.float64:
        raise_value_error("int8", "False with float64", "True")
    longest = max(E, H, Dv, R, call.weight_ih.shape[1] - E)
    if call.int8 and longest > MOST_BYTES:
        raise_value_error("int8", f"False with more than {MOST_BYTES} features", f"{longest}")
    if call.word_mask is not None:
        mask, rows = call.word_mask, len(call.word_mask) if call.word_mask.dim() else 0
        words = V + call.num_oov
        check_exact(mask, [("word_mask", mask, torch.bool, (1 if rows == 1 else B, words))])
    if call.prefix is not None:
        if call.prefix.dim() != 2:
            raise_value_error("prefix", "[B, P]", list(call.prefix.shape))
        longest = call.prefix.shape[1]
        check_exact(call.hidden, [("prefix", call.prefix, torch.int64, (B, longest))])
    if call.numbers is not None:
        shape = B, call.beam, call.most
        check_exact(call.hidden, [("numbers", call.numbers, torch.float64, shape)])
        if call.n_best != call.beam:
            raise_value_error("n_best", f"the beam of {call.beam} with numbers", call.n_best)
    for name in ("min_length", "no_repeat_ngram", "top_k"):
        if not 0 <= getattr(call, name) < 2**31:
            raise_value_error(name, "at least 0 and below 2**31", getattr(call, name))
    for name in ("temperature", "top_p"):
        if not getattr(call, name) > 0:
            raise_value_error(name, "above 0", getattr(call, name))
    for name, least in (("begin", 0), ("end", -1), ("unknown", 0)):
        if not least <= getattr(call, name) < V:
            raise_value_error(name, f"between {least} and {V - 1}", getattr(call, name))


def _check_copying(call: SearchInputs) -> None:
    V, R = call.weight_vocab.shape
    shape = len(call.limits), call.key.shape[1]  # type: ignore[union-attr]
    features = R
    if gate_reads_state(call):
        features = call.hidden.shape[-1] + call.value.shape[-1] + call.embedding.shape[1]  # type: ignore[union-attr]
    arguments: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("weight_pointer", call.weight_pointer, call.hidden.dtype, (1, features)),
        ("bias_pointer", call.bias_pointer, call.hidden.dtype, (1,)),
        ("source", call.source, torch.int64, shape),
    ]
    check_exact(call.hidden, arguments)
    if call.source is None:
        for name in ("weight_pointer", "bias_pointer"):
            if getattr(call, name) is not None:
                raise_value_error(name, "None without source", "a tensor")
        if call.num_oov:
            raise_value_error("num_oov", "0 without source", call.num_oov)
        return
    if call.weight_pointer is None:
        raise_value_error("weight_pointer", "a tensor with source", "None")
    if not 0 <= call.num_oov < 2**31:
        raise_value_error("num_oov", "at least 0 and below 2**31", call.num_oov)
    check_words("source", call.source, V + call.num_oov)


def _fake(call: SearchInputs) -> SearchOutputs:
    shape = call.hidden.shape[-2], call.n_best
    words, lengths = call.limits.new_empty(*shape, call.most), call.limits.new_empty(shape)
    like = call.hidden
    Tk = call.key.shape[1]  # type: ignore[union-attr]
    weights = like.new_empty((*words.shape, Tk) if call.need_weights else 0)
    return SearchOutputs(
        words, like.new_empty(words.shape), lengths, like.new_empty(shape), weights
    )


SEARCH = ForwardOperator(
    "search", SearchInputs, SearchOutputs, check=check, fake=_fake, backends=("cpu", "triton")
)
implement("triton", "attnfast.ops.search_steps", {"search": "search"})
