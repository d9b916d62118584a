"""The modules: their formulas, one step against many, and what models do to modules."""

import copy

import pytest
import torch

import attnfast
from attnfast.nn import (
    AttentionGRU,
    BahdanauAttention,
    CoverageAttention,
    LocationAwareAttention,
    LuongAttention,
    MultiHeadAttention,
)

B, TQ, TK, Q, K, A, H = 3, 4, 7, 10, 12, 8, 2
LENGTHS = torch.tensor([7, 4, 1])


def modules():
    return {
        "bahdanau": BahdanauAttention(Q, K, A, bias=True),
        "bahdanau, relu": BahdanauAttention(Q, K, A, activation="relu"),
        "dot": LuongAttention(K, K, "dot"),
        "scaled_dot": LuongAttention(K, K, "scaled_dot"),
        "cosine": LuongAttention(K, K, "cosine"),
        "general": LuongAttention(Q, K, "general"),
        "scaled_general": LuongAttention(Q, K, "scaled_general"),
        "concat": LuongAttention(Q, K, "concat", A),
        "heads, dot": MultiHeadAttention(Q, K, A, H),
        "heads, additive": MultiHeadAttention(Q, K, A, H, "additive"),
    }


@pytest.fixture(params=list(modules()))
def module(request):
    torch.manual_seed(0)
    module = modules()[request.param]
    assert module.activation == ("relu" if "relu" in request.param else "tanh")
    return module


def states(module):
    torch.manual_seed(1)
    query_dim = Q if any(True for _ in module.query_proj.parameters()) else K
    if isinstance(module, LuongAttention) and module.score_vector is None:
        query_dim = module.key_proj.out_features if hasattr(module.key_proj, "weight") else K
    return torch.randn(B, TQ, query_dim), torch.randn(B, TK, K)


def by_hand(module, query, source, values=None):
    """Weights ``[B, (H,) Tq, Tk]`` and context from the parameters alone."""
    values = source if values is None else values
    visible = torch.arange(TK) < LENGTHS[:, None, None]
    if isinstance(module, MultiHeadAttention):
        q, k, v = (
            p(x).view(B, -1, H, A // H).transpose(1, 2)
            for p, x in (
                (module.query_proj, query),
                (module.key_proj, source),
                (module.value_proj, values),
            )
        )
        visible = visible.unsqueeze(1)
    else:
        q, k, v = module.query_proj(query), module.key_proj(source), values
    if module.score_vector is not None:
        w = (
            module.score_vector
            if module.score_vector.dim() == 1
            else module.score_vector[:, None, None]
        )
        activation = getattr(torch, module.activation)
        score = (activation(q.unsqueeze(-2) + k.unsqueeze(-3)) * w).sum(-1)
    else:
        if type(module.key_proj).__name__ == "_Unit":
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (query, source))
        score = q @ k.transpose(-1, -2) * (module.scale or q.shape[-1] ** -0.5)
    weights = score.masked_fill(~visible, -torch.inf).softmax(-1)
    context = weights @ v
    if isinstance(module, MultiHeadAttention):
        context = module.out_proj(context.transpose(1, 2).reshape(B, TQ, A))
    return context, weights


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("dot", 1.0),
        ("scaled_dot", K**-0.5),
        ("general", 1.0),
        ("scaled_general", Q**-0.5),
        ("heads, dot", (A // H) ** -0.5),
    ],
)
def test_what_dot_scores_are_scaled_by(name, scale):
    module = modules()[name]
    module.scale = scale
    query, source = states(module)
    expected = by_hand(module, query, source)
    module = copy.deepcopy(module)
    module.scale = modules()[name].scale
    context, _ = module(query, module.prepare(source, LENGTHS))
    torch.testing.assert_close(context, expected[0])


def test_initial_parameters():
    """The score's weight lies within ±1/√A, and biases are there where they are asked for."""
    for width in (1, 100):
        weight = BahdanauAttention(Q, K, width).score_vector.abs()
        assert weight.max() <= width**-0.5
    assert weight.max() > 0.5 * width**-0.5
    assert [BahdanauAttention(Q, K, A, bias=x).query_proj.bias is None for x in (0, 1)] == [1, 0]


def test_formula_and_gradients(module):
    query, source = states(module)
    source.requires_grad_()
    memory = module.prepare(source, LENGTHS)
    context, weights = module(query, memory, need_weights=True)
    expected = by_hand(module, query, source)
    torch.testing.assert_close(context, expected[0])
    torch.testing.assert_close(weights, expected[1])
    assert module(query, memory)[1] is None
    leaves, noise = [source, *module.parameters()], torch.randn_like(context)
    got, want = (torch.autograd.grad((x * noise).sum(), leaves) for x in (context, expected[0]))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cosine_of_long_vectors(dtype):
    """Their norms are beyond the largest number of float16."""
    torch.manual_seed(0)
    query, source = 3e4 * torch.randn(1, 2, 64).sign(), 3e4 * torch.randn(1, 3, 64).sign()
    attention = LuongAttention(64, 64, "cosine")
    want = attention(query, attention.prepare(source), need_weights=True)[1]
    query, source = query.to(dtype), source.to(dtype)
    got = attention(query, attention.prepare(source), need_weights=True)[1]
    torch.testing.assert_close(got.float(), want, atol=4e-3, rtol=0)
    assert want.std() > 0.008


def test_values_apart_from_keys(module):
    query, source = states(module)
    wide = 5 if not isinstance(module, MultiHeadAttention) else K
    values = torch.randn(B, TK, wide, requires_grad=True)
    memory = module.prepare(source, LENGTHS, values=values)
    context, weights = module(query, memory, need_weights=True)
    want = by_hand(module, query, source, values)
    torch.testing.assert_close((context, weights), want)
    got = torch.autograd.grad(context.square().sum(), values)
    torch.testing.assert_close(got, torch.autograd.grad(want[0].square().sum(), values))
    if wide == 5:
        layer = AttentionGRU(4, query.shape[-1], 5, module)
        memory = layer.prepare(source, LENGTHS, values=values)
        result = layer(torch.randn(B, TQ, 4), memory, need_weights=True)
        torch.testing.assert_close(result.contexts, result.weights @ values)


@pytest.mark.parametrize("heads", [False, True])
def test_values_that_are_missing(heads):
    attention = BahdanauAttention(5, 5, 4)
    if heads:
        attention = MultiHeadAttention(5, 5, 4, 2, value_dim=6)
    memory = attention.prepare(torch.randn(B, TK, 5), values=torch.randn(B, TK, 6))
    for states in (torch.randn(B, 5), torch.randn(B, 2, 5)):
        with pytest.raises(
            ValueError, match="values must be given, because the memory's are separate"
        ):
            attention.append(memory, states)


def test_values_of_other_features_for_heads():
    attention, source = MultiHeadAttention(Q, K, A, H, value_dim=5), torch.randn(B, TK, K)
    memory = attention.prepare(source, values=torch.randn(B, TK, 5))
    assert attention(torch.randn(B, Q), memory)[0].shape == (B, A)


@pytest.mark.parametrize("kind", [CoverageAttention, LocationAwareAttention])
def test_values_apart_from_keys_with_a_history(kind):
    attention = kind(Q, K, A)
    source, values = torch.randn(B, TK, K), torch.randn(B, TK, 5)
    memory = attention.prepare(source, LENGTHS, values=values)
    context, weights, _ = attention(torch.randn(B, TQ, Q), memory, need_weights=True)
    torch.testing.assert_close(context, weights @ values)


def test_keys_and_values_of_ones_own():
    """Without a module: what is prepared once is what a function takes every time."""
    query, key, value = (torch.randn(B, n, A) for n in (TQ, TK, TK))
    for weight in (None, torch.randn(A)):
        memory = attnfast.prepare(key, value, weight, lengths=LENGTHS)
        got = attnfast.attend(query, memory, need_weights=True)
        if weight is None:
            want = attnfast.dot_attention(
                query, key, value, scale=1.0, lengths=LENGTHS, need_weights=True
            )
        else:
            want = attnfast.additive_attention(
                query, key, value, weight, lengths=LENGTHS, need_weights=True
            )
        torch.testing.assert_close(got[:2], want[:2])


def test_temperature(module):
    """It divides the scores: weights become their roots, put to a sum of 1 again."""
    query, source = states(module)
    memory = module.prepare(source, LENGTHS)
    _, weights = module(query, memory, need_weights=True)
    module.temperature = 2.0
    _, warmed = module(query, memory, need_weights=True)
    root = weights.sqrt()
    torch.testing.assert_close(warmed, root / root.sum(-1, keepdim=True))


def test_a_temperature_is_a_number(module):
    """No gradient would reach a parameter, whatever its value."""
    query, source = states(module)
    memory = module.prepare(source, LENGTHS)
    for value in (1.0, 0.5):
        module.temperature = torch.tensor(value, requires_grad=True)
        with pytest.raises(ValueError, match="temperature must be a positive number"):
            module(query, memory)


def test_distributed_data_parallel():
    """Two processes see one sequence each; the gradient is the mean of both."""
    import socket

    import torch.multiprocessing as mp
    from distributed_worker import gradients

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.manual_seed(0)
    module = BahdanauAttention(Q, K, A)
    data = (*states(module), LENGTHS)
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    shared = (port, module, *data, queue)
    workers = [context.Process(target=gradients, args=(rank, *shared)) for rank in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
        assert w.exitcode == 0
    got = [torch.tensor(g) for g in queue.get()]
    query, source, _ = data
    out = module(query[:2], module.prepare(source[:2], LENGTHS[:2]))[0]
    want = torch.autograd.grad(out.sum() / 2, list(module.parameters()))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
