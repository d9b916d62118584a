r"""The pointer-generator's distribution: words of the vocabulary, and words of the source.

    S_w = softmax(logits)_w,   p = sigmoid(gate),   C_w = Σ_{i: source_i = w} α_i
    P_w = p S_w + (1 − p) C_w     over the vocabulary's words, V of them, and X of the sources' own

This file is the contract, as :mod:`attnfast.ops.attention` is of attention without history.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnfast.backends import FLOATS, HALF, choose
from attnfast.errors import check_flag, describe, refuse
from attnfast.ops.arguments import check_dense, check_exact, refuse_tangents
from attnfast.ops.operators import (
    LIBRARIES,
    accumulation_dtype,
    call,
    define,
    is_recorded,
    operators_of,
)

#: ``log_sum_exp`` of the logits is float64, for a logit and it may both be large where their
#: difference is small.
SCHEMAS = {
    "copy_distribution": (
        "(Tensor logits, Tensor weights, Tensor source, Tensor gate, SymInt extra_words, bool log) "
        "-> (Tensor distribution, Tensor log_sum_exp)"
    ),
    "copy_distribution_backward": (
        "(Tensor grad_distribution, Tensor logits, Tensor weights, Tensor source, Tensor gate, "
        "Tensor log_sum_exp, SymInt extra_words, bool log) "
        "-> (Tensor grad_logits, Tensor grad_weights, Tensor grad_gate)"
    ),
}

#: The log-probability of a word that cannot come: that of the smallest normal float32.
LOWEST = math.log(torch.finfo(torch.float32).tiny)
#: In log space a gradient is at most e^LIMIT, and a mass of copies below e^−LIMIT counts as none.
LIMIT = 80


def reference(
    logits: Tensor, weights: Tensor, source: Tensor, gate: Tensor, extra_words: int, log: bool
) -> Tensor:
    """Compute the distribution in plain PyTorch: the oracle of every backend."""
    dtype = accumulation_dtype(logits.dtype)
    x, a, g = logits.to(dtype), weights.to(dtype), gate.to(dtype).unsqueeze(-1)
    none = (x == -math.inf).all(-1, keepdim=True)  # no word can be generated
    index = source.long().unsqueeze(1).expand(a.shape)
    copied = a.new_zeros((*x.shape[:-1], x.shape[-1] + extra_words)).scatter_add(-1, index, a)
    if not log:
        generated = x.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)
        generated = torch.nn.functional.pad(generated, (0, extra_words))
        return (g.sigmoid() * generated + (-g).sigmoid() * copied).to(logits.dtype)
    log_p, log_q = (torch.nn.functional.logsigmoid(y) for y in (g, -g))
    generated = log_p + x.masked_fill(none, 0).log_softmax(-1).masked_fill(none, -math.inf)
    generated = torch.nn.functional.pad(generated, (0, extra_words), value=-math.inf)
    # log P = m + log(e^{generated − m} + C e^{log q − m}), with the larger of the two as m.
    slight = copied < math.exp(-LIMIT)  # counts as 0, but for its gradient
    copied = copied - copied.detach().masked_fill(~slight, 0)
    never = (generated == -math.inf) & slight
    top = (log_q + copied.log()).maximum(generated).masked_fill(never, 0).detach()
    total = (generated - top).exp() + copied * (log_q - top).clamp(max=LIMIT).exp()
    log_probs = top + total.masked_fill(never, 1).log()
    return log_probs.masked_fill(never, LOWEST).to(logits.dtype)


def check(logits: Tensor, weights: Tensor, source: Tensor, gate: Tensor, extra_words: int) -> None:
    """Refuse arguments that do not fit together, in one sentence, before anything is computed."""
    named = {"logits": logits, "weights": weights, "source": source, "gate": gate}
    for name, x in named.items():
        check_dense(name, x)
        if x.device != logits.device:
            refuse(name, f"on the logits' device {logits.device}", x.device)
        if name in ("weights", "gate") and x.dtype != logits.dtype:
            refuse(name, f"of the logits' dtype {logits.dtype}", x.dtype)
    if logits.dtype not in FLOATS:
        refuse("logits", "float32, float64, bfloat16 or float16", logits.dtype)
    if logits.dim() != 3:
        refuse("logits", "[B, Tq, V]", list(logits.shape))
    B, Tq, V = logits.shape
    if weights.dim() != 3 or weights.shape[:2] != logits.shape[:2]:
        refuse("weights", f"[{B}, {Tq}, Tk] to fit the logits", list(weights.shape))
    if gate.shape != logits.shape[:2]:
        refuse("gate", f"[{B}, {Tq}] to fit the logits", list(gate.shape))
    shape = [B, weights.shape[-1]]
    if source.dtype not in (torch.int32, torch.int64) or list(source.shape) != shape:
        got = f"{source.dtype} {list(source.shape)}"
        refuse("source", f"int64 or int32 of shape {shape} to fit the weights", got)
    if not isinstance(extra_words, (int, torch.SymInt)) or not 0 <= extra_words < 2**31:
        refuse("extra_words", "an integer, at least 0", describe(extra_words))
    readable = type(source) is Tensor and source.device.type == "cpu" and source.numel()
    if readable and not torch.compiler.is_compiling():
        for word in (int(source.min()), int(source.max())):
            if not 0 <= word < V + extra_words:
                refuse("source", f"between 0 and {V + extra_words - 1}, a word", word)


def _check(logits, weights, source, gate, extra_words, log):
    check(logits, weights, source, gate, extra_words)


def _check_backward(
    grad_distribution, logits, weights, source, gate, log_sum_exp, extra_words, log
):  # fmt: skip
    check(logits, weights, source, gate, extra_words)
    *rows, V = logits.shape
    gradients = [
        ("grad_distribution", grad_distribution, logits.dtype, (*rows, V + extra_words)),
        ("log_sum_exp", log_sum_exp, torch.float64, rows),
    ]
    check_exact(logits, gradients)


#: What refuses an operator's arguments, with the same parameters; compiled code refuses the same.
CHECKS: dict[str, Any] = {
    "copy_distribution": _check,
    "copy_distribution_backward": _check_backward,
}


def _fake(logits, weights, source, gate, extra_words, log):
    *rows, V = logits.shape
    log_sum_exp = logits.new_empty(rows, dtype=torch.float64)
    return logits.new_empty((*rows, V + extra_words)), log_sum_exp


def _fake_backward(
    grad_distribution, logits, weights, source, gate, log_sum_exp, extra_words, log
):  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (logits, weights, gate))


def _setup_context(ctx: Any, inputs, output):
    logits, weights, source, gate, ctx.extra_words, ctx.log = inputs
    _, log_sum_exp = output
    ctx.save_for_backward(logits, weights, source, gate, log_sum_exp)
    ctx.mark_non_differentiable(log_sum_exp)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_distribution, _):
    if grad_distribution is None:
        return (None,) * 6
    grads = call(ctx.operator, grad_distribution, *ctx.saved_tensors, ctx.extra_words, ctx.log)
    need_logits, need_weights, _, need_gate, *_ = ctx.needs_input_grad
    logits, weights, gate = (
        grad if needed else None
        for grad, needed in zip(grads, (need_logits, need_weights, need_gate))
    )
    return logits, weights, None, gate, None, None


_Copy = define(
    "copy_distribution", SCHEMAS, CHECKS, _fake, _fake_backward, _setup_context, _backward
)


@torch.library.impl("attnfast_triton::copy_distribution", "default", lib=LIBRARIES["triton"])
def _triton(*args):
    from attnfast.kernels import copying  # Triton stays unimported until it is used

    check(*args[:5])
    return copying.forward(*args)


@torch.library.impl(
    "attnfast_triton::copy_distribution_backward", "default", lib=LIBRARIES["triton"]
)
def _triton_backward(*args):
    from attnfast.kernels import copying

    _check_backward(*args)
    return copying.backward(*args)


def copy_distribution(
    logits: Tensor,
    weights: Tensor,
    source: Tensor,
    gate: Tensor,
    *,
    extra_words: int = 0,
    log: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Mix the distribution over the vocabulary with that of copying a word of the source.

    .. math:: P_{tw} = p_t \, \mathrm{softmax}(\ell_t)_w
              + (1 - p_t) \sum_{i:\, s_i = w} \alpha_{ti}, \quad p_t = \sigma(g_t)

    Words that the vocabulary lacks take part by numbers from V on, given to them source by source.
    No tensor larger than the result is made, forward or backward, and the result does not depend on
    the order in which threads run.

    Args:
        logits: ℓ ``[B, Tq, V]``, or log-probabilities; −inf for a word that may not be generated.
            float32, float64, bfloat16 or float16; half types accumulate in float32.
        weights: α ``[B, Tq, Tk]``, of the logits' dtype, each row with sum 1 (or 0).
        source: s ``[B, Tk]``, int64 or int32, the word at every key, 0 ≤ s < V + X, also where the
            weights are 0.
        gate: g ``[B, Tq]``, the logit of p_gen, of the logits' dtype.
        extra_words: X, how many words beyond the vocabulary the sources of the batch bring.
        log: return log P, computed from logarithms: it loses nothing where p or P is near 0 or 1.
        backend: as in :func:`attnfast.additive_attention`.

    Returns:
        ``[B, Tq, V + X]``, of the logits' dtype; half types give float32 under autocast. A word
        that cannot come has P = 0, and −87.3 for its logarithm, with gradient 0: no logarithm of 0
        is ever taken. (One that can come, but hardly, may have less.)
        In log space a word's weights below e^−80 count as 0, and the gradient of a weight, which
        is (1 − p) / P times the result's, stops growing at e^80 (float16, bfloat16: at 65504).

    Raises:
        ValueError, TypeError: an argument does not fit; the sentence names it. On a GPU no word
            of the source is looked at, for checking would wait; one out of range is not copied.
        RuntimeError: the backend asked for cannot run this call; or a second derivative is asked
            of a backend other than ``"reference"``.

    Papers: See, Liu and Manning, "Get To The Point: Summarization with Pointer-Generator Networks",
    ACL 2017, arXiv:1704.04368; Gu et al., "Incorporating Copying Mechanism in Sequence-to-Sequence
    Learning", ACL 2016, arXiv:1603.06393.
    """
    device = logits.device.type if isinstance(logits, Tensor) else None
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        logits, weights, gate = (
            x.float() if isinstance(x, Tensor) and x.dtype in HALF else x
            for x in (logits, weights, gate)
        )
    if not isinstance(extra_words, (int, torch.SymInt)) or extra_words >= 2**31:
        refuse("extra_words", "an integer, at least 0", describe(extra_words))
    check_flag("log", log)
    log = bool(log)
    inputs: Any = (logits, weights, source, gate, extra_words, log)
    try:
        backend = choose(backend, logits.device, logits.dtype, "copy_distribution")
        if backend == "reference":
            check(*inputs[:5])
            return reference(*inputs)
        refuse_tangents(logits, weights, gate)
        operators = operators_of(backend)
        grad = torch.is_grad_enabled() and not is_recorded()
        if grad and (logits.requires_grad or weights.requires_grad or gate.requires_grad):
            return _Copy.apply(*inputs, operators)[0]
        return call(operators.copy_distribution.default, *inputs)[0]
    except Exception:
        check(*inputs[:5])
        raise
