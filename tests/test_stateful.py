"""Modules with a history and the pointer-generator: formulas, steps, masks, searches, dtypes."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from attention_cases import EAGER
from torch import nn

from attnfast.decoding.deferred import DeferredKeyGradients
from attnfast.nn import (
    CoverageAttention,
    ForwardAttention,
    LocationAwareAttention,
    PointerGenerator,
)

B, TQ, TK, Q, K, A = 3, 4, 7, 10, 12, 8
LENGTHS = torch.tensor([7, 4, 1])


def modules():
    return {
        "see": CoverageAttention(Q, K, A),
        "penalty": CoverageAttention(Q, K, A, feature=False, penalty=0.7),
        "learned penalty": CoverageAttention(Q, K, A, penalty=nn.Parameter(torch.tensor(0.3))),
        "fertility": CoverageAttention(Q, K, A, fertility=2.0),
        "location": LocationAwareAttention(Q, K, A, 5, 3),
        "location, coverage": LocationAwareAttention(Q, K, A, 5, 3, channels="coverage"),
        "location, both": LocationAwareAttention(Q, K, A, 5, 3, channels="both"),
        "location, uniform": LocationAwareAttention(Q, K, A, 5, 3, initial_weights="uniform"),
        "both, uniform": LocationAwareAttention(
            Q, K, A, 5, 3, channels="both", initial_weights="uniform"
        ),
        "location, relu": LocationAwareAttention(Q, K, A, 5, 3, activation="relu"),
        "fertility, leaky": CoverageAttention(Q, K, A, fertility=2.0, activation="leaky_relu"),
        "penalty, sigmoid": CoverageAttention(Q, K, A, penalty=0.7, normalisation="sigmoid"),
        "location, sigmoid": LocationAwareAttention(Q, K, A, 5, 3, normalisation="sigmoid"),
        "forward": ForwardAttention(Q, K, A),
        "forward, location": ForwardAttention(Q, K, A, 5, 3),
    }


@pytest.fixture(params=list(modules()))
def module(request):
    torch.manual_seed(0)
    module = modules()[request.param].double()
    asked = {"location, relu": "relu", "fertility, leaky": "leaky_relu"}
    assert module.activation == asked.get(request.param, "tanh")
    return module


def states():
    torch.manual_seed(1)
    return torch.randn(B, TQ, Q).double(), torch.randn(B, TK, K).double()


def by_hand(module, query, source):
    """Contexts, weights and loss from the parameters alone, as the papers' equations say it."""
    visible = torch.arange(TK) < LENGTHS[:, None]
    q, k = module.query_proj(query), module.key_proj(source)
    coverage = previous = source.new_zeros(B, TK)
    if getattr(module, "initial_weights", "zeros") == "uniform":
        coverage = previous = visible / LENGTHS[:, None].double()
    forward = isinstance(module, ForwardAttention)
    if forward:
        previous = F.one_hot(torch.zeros(B, dtype=torch.long), TK).double()
    rate, rows, loss = 1.0, [], 0
    if getattr(module, "fertility_proj", None) is not None:
        rate = 1 / (2 * module.fertility_proj(source).squeeze(-1).sigmoid())
    for t in range(TQ):
        features = q[:, t, None] + k
        if getattr(module, "coverage_weight", None) is not None:
            features = features + coverage[..., None] * module.coverage_weight
        if getattr(module, "location_conv", None) is not None:
            signals = {"previous": [previous], "coverage": [coverage]}
            signals = signals.get(module.channels, [previous, coverage])
            found = F.conv1d(torch.stack(signals, 1), module.location_conv.weight, padding=1)
            features = features + module.location_proj(found.transpose(1, 2))
        e = EAGER[module.activation](features) @ module.score_vector
        if getattr(module, "penalty", None) is not None:
            e = e - module.penalty * coverage
        a = e.masked_fill(~visible, -math.inf).softmax(-1)
        if module.normalisation == "sigmoid":
            a = e.sigmoid() * visible
            a = a / a.sum(-1, keepdim=True)
        if forward:
            a = a * (previous + F.pad(previous, (1, 0))[:, :-1])
            a = a / a.sum(-1, keepdim=True)
        loss = loss + torch.minimum(a, coverage).sum(-1)
        coverage, previous = coverage + rate * a, a
        rows.append(a)
    weights = torch.stack(rows, 1)
    return weights @ source, weights, coverage, loss


def test_formula_and_gradients(module):
    query, source = (x.requires_grad_() for x in states())
    memory = module.prepare(source, LENGTHS)
    context, weights, history = module(query, memory, need_weights=True)
    got = (context, weights, history.coverage, history.loss)
    wanted = by_hand(module, query, source)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(history.previous, weights[:, -1])
    assert module(query, memory)[1] is None
    leaves = [query, source, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad(sum(x.sin().sum() for x in results), leaves)
                      for results in (got, wanted))):  # fmt: skip
        torch.testing.assert_close(a, b)


@pytest.mark.cpu_library
def test_steps_share_their_gradients(module):
    """All steps take one token of the memory, or of the filters, and are the whole's in the end."""
    query, source = states()
    source.requires_grad_()
    leaves, grads = [source, *module.parameters()], []
    context, _, history = module(query, module.prepare(source, LENGTHS))
    loss = context.sin().sum() + history.loss.sum()
    grads.append(torch.autograd.grad(loss, leaves))
    history, loss = None, 0
    with mock.patch.object(
        DeferredKeyGradients, "apply", wraps=DeferredKeyGradients.apply
    ) as apply:
        memory = module.prepare(source, LENGTHS)
        for t in range(TQ):
            context, _, history = module(query[:, t], memory, history)
            loss = loss + context.sin().sum()
    grads.append(torch.autograd.grad(loss + history.loss.sum(), leaves))
    filters = ("coverage_weight", "location_conv")
    filters = any(getattr(module, name, None) is not None for name in filters)
    assert apply.call_count == 1 + filters
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


def test_temperature(module):
    query, source = states()
    warm = copy.deepcopy(module)
    warm.temperature = 2.0
    with torch.no_grad():
        module.score_vector.div_(2)
        if getattr(module, "penalty", None) is not None:
            module.penalty = (
                nn.Parameter(module.penalty / 2)
                if isinstance(module.penalty, nn.Parameter)
                else module.penalty / 2
            )
        halved = module.prepare(source, LENGTHS)
        warmed = warm(query, warm.prepare(source, LENGTHS))[0]
        torch.testing.assert_close(warmed, module(query, halved)[0])


def test_a_transition_agent():
    torch.manual_seed(0)
    module = ForwardAttention(Q, K, A).double()
    query, source = states()
    memory = module.prepare(source, LENGTHS)
    u = torch.rand(B, TQ).double()
    context, _, _ = module(query, memory, transition_prob=u)
    history = None
    for t in range(TQ):
        step, _, history = module(query[:, t], memory, history, transition_prob=u[:, t])
        torch.testing.assert_close(step, context[:, t])


@pytest.mark.parametrize("log", [False, True])
def test_pointer_generator(log):
    torch.manual_seed(0)
    module = PointerGenerator(K, Q, 5)
    logits, weights = torch.randn(B, TQ, 9), torch.randn(B, TQ, TK).softmax(-1)
    source = torch.randint(0, 11, (B, TK))
    features = (torch.randn(B, TQ, K), torch.randn(B, TQ, Q), torch.randn(B, TQ, 5))
    out = module(logits, weights, source, *features, num_oov=2, log=log)
    p = module.gate(torch.cat(features, -1)).sigmoid()
    wanted = F.pad(p * logits.softmax(-1), (0, 2)).scatter_add(
        -1, source.unsqueeze(1).expand(B, TQ, TK), (1 - p) * weights
    )
    torch.testing.assert_close(out.exp() if log else out, wanted)
    step = module(
        logits[:, 1], weights[:, 1], source, *(x[:, 1] for x in features), num_oov=2, log=log
    )
    torch.testing.assert_close(step, out[:, 1])


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", [LocationAwareAttention, ForwardAttention])
def test_quantised(kind):
    """Linear layers in 8 bits give contexts near those in 32."""
    torch.manual_seed(0)
    module = kind(Q, K, 16, num_filters=4, width=3)
    query, source = (x.float() for x in states())
    wanted = module(query, module.prepare(source, LENGTHS))[0]
    quantised = torch.ao.quantization.quantize_dynamic(
        torch.nn.ModuleDict({"attention": module}), {torch.nn.Linear}, dtype=torch.qint8
    )["attention"]
    assert not isinstance(quantised.location_proj.weight, torch.Tensor)
    with torch.no_grad():
        context = quantised(query, quantised.prepare(source, LENGTHS))[0]
    assert 0 < (context - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_pointer_generator_of_no_features():
    with pytest.raises(ValueError, match="feature_dims must be one size or more"):
        PointerGenerator()
