r"""Test whether attention weights explain a model's decision.

A reader (:class:`AttentionModel`) is called with embedded inputs ``[B, n, E]`` and ``lengths [B]``,
each at least 1. It returns a callable (:class:`Decision`) that computes logits from the model's own
attention weights or from given ones::

    reading = reader(embedded, lengths)
    logits, weights = reading()  # [B, C] and [B, n]
    logits, _ = reading(other_weights)

The ``read`` of a :class:`attnfast.models.Classifier` is a reader; :func:`next_word` makes one from
a translator; supporting another model takes a few lines. The model must be in evaluation mode, and
a sentence's result must not depend on the rest of the batch, nor on padding.

In the formulas x are the embedded inputs, α the weights and j a key of n; y = softmax(logits) is
the output, ŷ its largest entry: the decision. Importance and weights ``[B, n]`` are 0 in padding.
Values for each sentence are ``[B]``. Random numbers come from a CPU generator seeded with ``seed``.
No parameter gets a gradient. An argument that does not fit raises ValueError or TypeError, and the
message names it. Most functions take these arguments first:

``reader``
    the model, an :class:`AttentionModel`.
``embedded``
    embedded inputs ``[B, n, E]``.
``lengths``
    the number of inputs of each sentence, ``[B]``, each at least 1.

Papers: Jain and Wallace, "Attention is not Explanation", NAACL 2019, arXiv:1902.10186; Wiegreffe
and Pinter, "Attention is not not Explanation", EMNLP 2019, arXiv:1908.04626; Serrano and Smith, "Is
Attention Interpretable?", ACL 2019, arXiv:1906.03731.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attnfast._utils.checks import (
    check_array,
    check_device,
    check_flag,
    check_int,
    check_number,
    describe,
    raise_type_error,
    raise_value_error,
)
from attnfast._utils.module import Module
from attnfast.models._checks import check_ids, check_lengths
from attnfast.models.decoders import FixedContext
from attnfast.models.seq2seq import EncodedSource, Seq2Seq
from attnfast.nn import GatedAttention, Memory, MultiHopAttention
from attnfast.ops.arguments import length_mask
from attnfast.ops.operators import accumulation_dtype

__all__ = [
    "Adversarial",
    "AttentionModel",
    "Decision",
    "PermutationOutput",
    "adversarial",
    "erasure",
    "gradient_times_input",
    "jensen_shannon",
    "kendall_tau",
    "leave_one_out",
    "next_word",
    "permutation_test",
    "total_variation",
    "weight_gradient",
]


class Decision(Protocol):
    """Protocol of an encoded input, which can be called several times for a decision.

    Example:
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> decide = model.read(embedded, lengths)
        >>> logits, weights = decide()  # with the model's own weights
        >>> logits, _ = decide(weights.flip(0))  # with other weights
    """

    def __call__(self, weights: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, C]`` and the weights ``[B, n]``: the given ones, or its own."""
        ...


class AttentionModel(Protocol):
    """Protocol of a model: it encodes embedded inputs and returns a :class:`Decision`.

    Example:
        >>> def reader(embedded, lengths):  # a model without parameters
        ...     def decide(weights=None):
        ...         weights = embedded.sum(-1).softmax(-1) if weights is None else weights
        ...         return (weights.unsqueeze(1) @ embedded).squeeze(1), weights
        ...     return decide
        >>> decide = reader(torch.randn(2, 5, 4), torch.tensor([5, 5]))
        >>> decide()[0].shape
        torch.Size([2, 4])
    """

    def __call__(self, embedded: Tensor, lengths: Tensor, /) -> Decision:
        """Read ``embedded [B, n, E]``, of which ``lengths [B]`` exist."""
        ...


class _Given(Module):
    """An attention with given weights ``[B, Tk]`` for any state."""

    backend = "reference"

    def __init__(self, weights: Tensor):
        super().__init__()
        self.weights = weights

    def forward(
        self, state: Tensor, memory: Memory, need_weights: bool | str = False
    ) -> tuple[Tensor, Tensor]:
        weights = self.weights if state.dim() == 2 else self.weights.unsqueeze(1)
        context = weights.view(len(weights), -1, weights.shape[-1]) @ memory.value
        return context.view(*weights.shape[:-1], -1), weights


def next_word(model: Seq2Seq, words: Tensor) -> AttentionModel:
    """Make a reader of a translator, whose decision is the word after ``words``.

    The weights are those of that one decoder step; earlier steps keep their own. The gate of a
    :class:`attnfast.nn.GatedAttention` scales the context of given weights too. Inputs are
    ``model.embed(source)``.

    Args:
        model: in evaluation mode; its attention has weights ``[B, Tk]`` and no history, and it
            copies no words.
        words: ids ``[B, T]`` of the previous words, from the start on.

    Example:
        >>> from attnfast.analysis.faithfulness import leave_one_out, next_word
        >>> from attnfast.models import BOS, Config, build
        >>> model = build(Config(vocab_size=50, embed_dim=8, hidden_dim=8)).eval()
        >>> source, lengths = torch.randint(4, 50, (2, 5)), torch.tensor([5, 3])
        >>> reader = next_word(model, torch.full((2, 1), BOS))  # the first word
        >>> leave_one_out(reader, model.embed(source), lengths).shape
        torch.Size([2, 5])
    """
    if not isinstance(model, Seq2Seq):
        raise_type_error("model", "an attnfast.models.Seq2Seq", describe(model))
    if model.training:
        raise_value_error("model", "in evaluation mode", "one in training")
    gated = isinstance(model.decoder.attention, GatedAttention)
    holder = model.decoder.attention if gated else model.decoder
    attention = holder.attention
    unfit = isinstance(attention, (FixedContext, MultiHopAttention))
    unfit = unfit or getattr(attention, "has_history", False) or hasattr(attention, "num_heads")
    if unfit or model.pointer is not None:
        expected = "one whose attention has weights [B, Tk] and no history, and that copies nothing"
        raise_value_error(
            "model", expected, f"{type(attention).__name__}" + ", copying" * bool(model.pointer)
        )
    check_ids("words", words, model.embedding.num_embeddings)
    check_device("words", words, model.embedding.weight, "model")
    if not words.shape[1]:
        raise_value_error("words", "ids [B, T] of at least one word", describe(words))

    def read(embedded: Tensor, lengths: Tensor) -> Decision:
        if len(embedded) != len(words):
            raise_value_error(
                "embedded", f"of as many sentences as words, {len(words)}", len(embedded)
            )
        memory, state = model.read(embedded, lengths)
        source = EncodedSource(memory, words, 0)
        if words.shape[1] > 1:
            state = model.decode(words[:, :-1], state, source)[1]

        def decide(weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
            if weights is not None:
                holder.attention = _Given(weights)
            try:
                logits, _, used = model.decode(words[:, -1:], state, source, need_weights=True)
            finally:
                holder.attention = attention
            assert used is not None
            return logits[:, 0], used[:, 0]

        return decide

    return read


def _check(reader: object, embedded: object, lengths: object) -> None:
    """Raise unless ``reader`` is a model and the inputs are embedded sentences with lengths."""
    fits = callable(reader) and not isinstance(reader, type)
    call: Any = reader.forward if isinstance(reader, nn.Module) else reader
    try:
        inspect.signature(call).bind(embedded, lengths)
    except TypeError:
        fits = False
    except ValueError:
        pass  # a callable written in C need not have a signature
    if not fits:
        raise_type_error("reader", "a call with embedded inputs and lengths", describe(reader))
    check_array("embedded", embedded, "floating-point", ("B", "n", "E"))
    assert isinstance(embedded, Tensor)
    if not embedded.shape[1]:
        raise_value_error("embedded", "of one word at least", describe(embedded))
    check_lengths(lengths, embedded, whose="embedded")


def _check_pair(p: Tensor, q: Tensor) -> None:
    """Raise unless p and q are tensors ``[.., C]`` of one shape."""
    check_array("p", p, "floating-point")
    if not p.dim():
        raise_value_error("p", "floating-point [.., C]", describe(p))
    check_array("q", q, "floating-point", p.shape, like=p, of="p")


def _decide(
    reading: Decision, embedded: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits and weights; raise unless the model returned both."""
    if not callable(reading):
        raise_value_error("reader(embedded, lengths)", "a callable", describe(reading))
    result = reading() if weights is None else reading(weights)
    try:
        logits, used = result
        B, n = embedded.shape[:2]
        fits = logits.dim() == 2 and len(logits) == B and list(used.shape) == [B, n]
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not fits:
        raise_value_error(
            "reader", f"to decide by logits [B, C] and weights {[B, n]}", describe(result)
        )
    return logits, used


def _output(
    reading: Decision, embedded: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, C]`` and the weights, in the accumulation dtype."""
    logits, used = _decide(reading, embedded, weights)
    dtype = accumulation_dtype(logits.dtype)
    return logits.softmax(-1, dtype=dtype), used.to(dtype)


def _exist(embedded: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask ``[B, n]`` of keys that are not padding."""
    return length_mask(lengths, embedded.shape[1], embedded)


# ---- distances ----------------------------------------------------------------------------------


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    r"""Return :math:`\frac12 \sum_c |p_c - q_c|` of distributions ``[.., C]``, from 0 to 1.

    Example:
        >>> p, q = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
        >>> attnfast.analysis.faithfulness.total_variation(p, q)
        tensor(0.5000)
    """
    _check_pair(p, q)
    return (p - q).abs().sum(-1) / 2


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    r"""Return the Jensen–Shannon divergence of distributions ``[.., n]``, in nats, at most ln 2.

    .. math:: \frac12 \sum_j p_j \ln \frac{p_j}{m_j} + \frac12 \sum_j q_j \ln \frac{q_j}{m_j},
              \quad m = (p + q) / 2

    Example:
        >>> p, q = torch.eye(2)  # disjoint distributions
        >>> attnfast.analysis.faithfulness.jensen_shannon(p, q)
        tensor(0.6931)
    """
    _check_pair(p, q)
    ways = (p, 0.5), (q, 0.5), ((p + q) / 2, -1.0)
    parts = (c * x * x.clamp_min(torch.finfo(x.dtype).tiny).log() for x, c in ways)
    return sum(parts, torch.zeros_like(p)).sum(-1).clamp_min(0)


def kendall_tau(a: Tensor, b: Tensor, lengths: Tensor | None = None) -> Tensor:
    r"""Return Kendall's rank correlation of two rows of numbers, with ties: τ-b.

    .. math:: \tau = \frac{\sum_{i<j} s_{ij} t_{ij}}{\sqrt{\sum_{i<j} s_{ij}^2}
              \sqrt{\sum_{i<j} t_{ij}^2}}, \quad
              s_{ij} = \mathrm{sign}(a_i - a_j), \; t_{ij} = \mathrm{sign}(b_i - b_j)

    Args:
        a, b: ``[B, n]``; NaN in padding is ignored.
        lengths: ``[B]``; None means n.

    Returns:
        ``[B]``, from −1 to 1; NaN if a row of either has fewer than two different numbers.

    Paper: Kendall, "The Treatment of Ties in Ranking Problems", Biometrika 33(3), 1945.

    Example:
        >>> a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[3.0, 2.0, 1.0]])
        >>> attnfast.analysis.faithfulness.kendall_tau(a, b)
        tensor([-1.])
    """
    check_array("a", a, "floating-point", ("B", "n"))
    check_array("b", b, "floating-point", a.shape, like=a, of="a")
    exists = torch.ones_like(a, dtype=torch.bool)
    if lengths is not None:
        check_lengths(lengths, a, whose="a")
        exists = _exist(a, lengths)
    both = exists.unsqueeze(1) & exists.unsqueeze(2)
    s, t = (
        (x.unsqueeze(2) > x.unsqueeze(1)).double() - (x.unsqueeze(2) < x.unsqueeze(1)).double()
        for x in (a, b)
    )
    counts = [(x * both).sum((1, 2)) for x in (s * t, s * s, t * t)]
    tau = counts[0] / (counts[1] * counts[2]).sqrt()
    return tau.to(accumulation_dtype(a.dtype))


# ---- importance ---------------------------------------------------------------------------------


def gradient_times_input(
    reader: AttentionModel, embedded: Tensor, lengths: Tensor, *, fixed: bool = False
) -> Tensor:
    r"""Return the first-order importance of each input for the decision, ``[B, n]``.

    .. math:: g_j = \Big| \sum_e x_{je} \frac{\partial \ln y_{\hat y}}{\partial x_{je}} \Big|

    Args:
        fixed: hold the attention weights constant, as Jain and Wallace do; else the gradient
            goes through them too.

    Example:
        >>> from attnfast.analysis.faithfulness import gradient_times_input
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> gradient_times_input(model.read, embedded, lengths).shape
        torch.Size([2, 5])
    """
    _check(reader, embedded, lengths)
    check_flag("fixed", fixed)
    with torch.enable_grad():
        x = embedded.detach().requires_grad_()
        reading = reader(x, lengths)
        weights = _decide(reading, x)[1].detach() if fixed else None
        (gradient,) = torch.autograd.grad(_decided(_decide(reading, x, weights)[0]), x)
    importance = (x * gradient).sum(-1).abs().detach()
    return importance.masked_fill(~_exist(x, lengths), 0)


def _decided(logits: Tensor) -> Tensor:
    """Return the sum over sentences of ln y of the decision."""
    logs = logits.log_softmax(-1, dtype=accumulation_dtype(logits.dtype))
    return logs.gather(-1, logits.argmax(-1, keepdim=True)).sum()


@torch.no_grad()
def leave_one_out(reader: AttentionModel, embedded: Tensor, lengths: Tensor) -> Tensor:
    r"""Return the change of the output without each input, ``[B, n]``.

    .. math:: \ell_j = \frac12 \sum_c |y_c(x) - y_c(x_{-j})|

    The inputs after j move up. The result is 0 for a sentence of one input, which would be empty.

    Example:
        >>> from attnfast.analysis.faithfulness import leave_one_out
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> leave_one_out(model.read, embedded, lengths).shape
        torch.Size([2, 5])
    """
    _check(reader, embedded, lengths)
    whole, _ = _output(reader(embedded, lengths), embedded)
    others = torch.arange(max(embedded.shape[1] - 1, 0), device=embedded.device)
    exists, changes = _exist(embedded, lengths), []
    for j in range(embedded.shape[1] if len(others) else 0):
        shortened = embedded[:, others + (others >= j)]
        count = (lengths - (lengths > j).to(lengths.dtype)).clamp_min(1)
        changes.append(total_variation(whole, _output(reader(shortened, count), shortened)[0]))
    if not changes:
        return whole.new_zeros(exists.shape)
    return torch.stack(changes, 1).masked_fill(~(exists & exists[:, 1:2]), 0)


def weight_gradient(reader: AttentionModel, embedded: Tensor, lengths: Tensor) -> Tensor:
    r"""Return :math:`\partial \ln y_{\hat y} / \partial \alpha_j`, ``[B, n]``.

    Each weight is varied independently, without normalising the others. Multiplied by the weights,
    it is the second gradient ranking of Serrano and Smith.

    Example:
        >>> from attnfast.analysis.faithfulness import weight_gradient
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> weight_gradient(model.read, embedded, lengths).shape
        torch.Size([2, 5])
    """
    _check(reader, embedded, lengths)
    with torch.no_grad():
        reading = reader(embedded, lengths)
        weights = _decide(reading, embedded)[1]
    with torch.enable_grad():
        weights = weights.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(_decided(_decide(reading, embedded, weights)[0]), weights)
    return gradient.masked_fill(~_exist(embedded, lengths), 0)


# ---- other weights ------------------------------------------------------------------------------


class PermutationOutput(NamedTuple):
    """Result of :func:`permutation_test`, ``[B]``.

    Attributes:
        distance: the median total variation of the output over the permutations.
        divergence: the median Jensen–Shannon divergence of the weights over the permutations.
        largest: the largest weight before the permutations.

    Example:
        >>> from attnfast.analysis.faithfulness import permutation_test
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> result = permutation_test(model.read, embedded, lengths, count=10)
        >>> result.largest.shape
        torch.Size([2])
    """

    distance: Tensor
    divergence: Tensor
    largest: Tensor


@torch.no_grad()
def permutation_test(
    reader: AttentionModel, embedded: Tensor, lengths: Tensor, *, count: int = 100, seed: int = 0
) -> PermutationOutput:
    """Shuffle each sentence's weights ``count`` times and measure the change of its output.

    If attention explains a decision, shuffled weights should change the output; the larger the
    largest weight, the more.

    Returns:
        ``distance``: the median :func:`total_variation` of the output; ``divergence``: the median
        :func:`jensen_shannon` of the weights; ``largest``: the largest weight.

    Example:
        >>> from attnfast.analysis.faithfulness import permutation_test
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> result = permutation_test(model.read, embedded, lengths, count=10)
        >>> (result.distance < 0.1).tolist()  # no output depends on its weights
        [True, True]
    """
    _check(reader, embedded, lengths)
    check_int("count", count)
    generator = _generator(seed)
    reading = reader(embedded, lengths)
    output, weights = _output(reading, embedded)
    hidden = ~_exist(embedded, lengths)
    changes = []
    for _ in range(count):
        drawn = torch.rand(weights.shape, generator=generator, dtype=weights.dtype).to(weights)
        other = weights.gather(1, drawn.masked_fill(hidden, 2).argsort(1))
        moved, _ = _output(reading, embedded, other.to(embedded.dtype))
        changes.append(
            torch.stack([total_variation(output, moved), jensen_shannon(weights, other)])
        )
    stacked = torch.stack(changes)
    distance, divergence = stacked.quantile(0.5, dim=0) if stacked.numel() else stacked[0]
    return PermutationOutput(distance, divergence, weights.amax(1))


def _generator(seed: object) -> torch.Generator:
    check_int("seed", seed, 0)
    return torch.Generator().manual_seed(int(seed))  # type: ignore[call-overload]


class Adversarial(NamedTuple):
    """Result of :func:`adversarial`.

    Attributes:
        divergence: the Jensen–Shannon divergence of the weights found, ``[B]``; 0 if none were
            found.
        distance: the total variation of the output with these weights, ``[B]``.
        weights: the weights found, ``[B, n]``, or the model's own if none were found.
        bound: the largest divergence that any weights have, ``[B]``.

    Example:
        >>> from attnfast.analysis.faithfulness import adversarial
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> found = adversarial(model.read, embedded, lengths, restarts=1, steps=5)
        >>> found.weights.shape, (found.divergence <= found.bound).tolist()
        (torch.Size([2, 5]), [True, True])
    """

    divergence: Tensor
    distance: Tensor
    weights: Tensor
    bound: Tensor


def adversarial(
    reader: AttentionModel,
    embedded: Tensor,
    lengths: Tensor,
    *,
    epsilon: float = 0.05,
    restarts: int = 3,
    steps: int = 200,
    seed: int = 0,
) -> Adversarial:
    r"""Search for weights that are as different as possible but leave the output nearly unchanged.

    .. math:: \max_{\tilde\alpha} \mathrm{JSD}(\alpha, \tilde\alpha) \quad \text{subject to} \quad
              \mathrm{TVD}(y, \tilde y) \le \varepsilon

    Adam maximises the divergence over the logits of :math:`\tilde\alpha`; if the output violates
    the constraint, it reduces the change of the output instead. The result is the best weights of
    all steps that satisfy the constraint, and its divergence is a lower bound.

    The weights are chosen for each sentence separately. A model that is trained to produce such
    weights on all sentences, with the same decisions, is a different and harder test (Wiegreffe and
    Pinter). If such weights exist for a sentence, its decision does not need its own weights; it
    does not follow that another model would attend in that way. A JSD is at most ln 2 = 0.693.

    Args:
        epsilon: ε, the largest :func:`total_variation` of the output.
        restarts: starts from random weights.
        steps: of each.

    Returns:
        ``divergence``: the :func:`jensen_shannon` of the weights, 0 if none were found;
        ``distance``: the :func:`total_variation` of the output; ``weights``; ``bound``: the largest
        divergence of any weights, reached with all weight on the key that has least.

    Example:
        >>> from attnfast.analysis.faithfulness import adversarial
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> found = adversarial(model.read, embedded, lengths, epsilon=0.05, restarts=1, steps=5)
        >>> (found.distance <= 0.05).tolist()
        [True, True]
    """
    _check(reader, embedded, lengths)
    check_number("epsilon", epsilon, 0, 1)
    check_int("restarts", restarts)
    check_int("steps", steps)
    generator = _generator(seed)
    with torch.no_grad():
        reading = reader(embedded, lengths)
        output, weights = _output(reading, embedded)
    exists = _exist(embedded, lengths)
    least = weights.masked_fill(~exists, torch.inf).argmin(1)
    bound = jensen_shannon(weights, nn.functional.one_hot(least, exists.shape[1]).to(weights))
    best = Adversarial(torch.zeros_like(bound), torch.zeros_like(bound), weights, bound)

    def judge(other: Tensor) -> Tensor:
        """Save the weights of sentences for which they are better; return the loss."""
        nonlocal best
        moved, _ = _output(reading, embedded, other.to(embedded.dtype))
        distance, divergence = total_variation(output, moved), jensen_shannon(weights, other)
        now = Adversarial(divergence.detach(), distance.detach(), other.detach(), bound)
        better = (now.distance <= epsilon) & (now.divergence > best.divergence)
        chosen = (
            torch.where(better.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(now, best)
        )
        best = Adversarial(*chosen)
        return (20 * (distance - epsilon).clamp_min(0) - divergence).sum()

    with torch.no_grad():
        ends = torch.eye(embedded.shape[1], dtype=weights.dtype, device=weights.device)
        for j, end in enumerate(ends):
            judge(torch.where(exists[:, j : j + 1], end, weights))  # the divergence is convex
    for _ in range(restarts):
        z = torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
        z = z.to(weights).requires_grad_()
        adam = torch.optim.Adam([z], lr=0.2)
        for _ in range(steps):
            with torch.enable_grad():
                loss = judge(z.masked_fill(~exists, -torch.inf).softmax(-1))
                (z.grad,) = torch.autograd.grad(loss, z)
            adam.step()
    return best


@torch.no_grad()
def erasure(reader: AttentionModel, embedded: Tensor, lengths: Tensor, ranking: Tensor) -> Tensor:
    """Return the share of the keys to erase, the highest ranked first, before the decision changes.

    Erased keys have weight 0; the weights of the others are renormalised. The smaller the share,
    the better the ranking identifies the keys on which the decision depends.

    Args:
        ranking: ``[B, n]``: the weights, :func:`weight_gradient`, their product, random numbers.

    Returns:
        ``[B]``, above 0; 1 if the last key alone still gives the same decision.

    Example:
        >>> from attnfast.analysis.faithfulness import erasure, weight_gradient
        >>> from attnfast.models import Classifier, Encoder
        >>> model = Classifier(Encoder(4, 4), vocab_size=20, embed_dim=4, classes=3).eval()
        >>> embedded, lengths = model.embed(torch.randint(4, 20, (2, 5))), torch.tensor([5, 3])
        >>> ranking = weight_gradient(model.read, embedded, lengths)
        >>> erasure(model.read, embedded, lengths, ranking).shape
        torch.Size([2])
    """
    _check(reader, embedded, lengths)
    shape = embedded.shape[:2]
    check_array("ranking", ranking, "floating-point", shape, like=embedded, of="embedded")
    reading = reader(embedded, lengths)
    output, weights = _output(reading, embedded)
    decision, hidden = output.argmax(-1), ~_exist(embedded, lengths)
    count = (~hidden).sum(-1, dtype=output.dtype)
    order = ranking.masked_fill(hidden, -torch.inf).argsort(dim=1, descending=True, stable=True)
    share, remaining = torch.ones_like(output[:, 0]), weights.clone()
    for k in range(1, embedded.shape[1]):
        remaining.scatter_(1, order[:, k - 1 : k], 0)
        some = remaining / remaining.sum(-1, keepdim=True).clamp_min(
            torch.finfo(remaining.dtype).tiny
        )
        changed = _output(reading, embedded, some.to(embedded.dtype))[0].argmax(-1) != decision
        first = changed & (share == 1) & (k < count)
        share = torch.where(first, k / count, share)
    return share
