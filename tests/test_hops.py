"""Several hops over a memory, the k best keys, and memory networks: by loops over stories."""

import pytest
import torch

from attnfast.nn import (
    AttentionGRU,
    BahdanauAttention,
    CoverageAttention,
    LuongAttention,
    MultiHopAttention,
    TopKAttention,
)

B, TQ, TK, D = 3, 4, 9, 6
LENGTHS = torch.tensor([9, 1, 4])


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# ---- several hops -------------------------------------------------------------------------------


def hops_by_hand(module, query, sources, seen):
    """Return what one query [D] has found, and the weights [K, Tk] of the keys that it sees."""
    u, found = query, []
    for k in range(module.hops):
        keys, values = sources[k : k + 2] if module.tying == "adjacent" else sources
        scores = keys[seen] @ u
        weights = scores if module.linear else scores.exp() / scores.exp().sum()
        u = (module.between.weight @ u if module.tying == "layer-wise" else u) + sum(
            w * c for w, c in zip(weights, values[seen])
        )
        found.append(torch.zeros(len(keys), dtype=u.dtype).masked_scatter(seen, weights))
    return u, torch.stack(found)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("tying", ["adjacent", "layer-wise"])
def test_hops(tying, linear):
    torch.manual_seed(0)
    module = MultiHopAttention(D, 3, tying).double()
    module.linear = linear
    sources = [double(B, TK, D) for _ in range(4 if tying == "adjacent" else 2)]
    query, mask = double(B, TQ, D), torch.rand(B, TK) > 0.2
    mask[:, 0] = True
    memory = module.prepare(sources, LENGTHS, mask)
    result, weights = module(query, memory, need_weights=True)
    seen = mask & (torch.arange(TK) < LENGTHS[:, None])
    want = [
        [hops_by_hand(module, query[i, t], [x[i] for x in sources], seen[i]) for t in range(TQ)]
        for i in range(B)
    ]
    expected = torch.stack([torch.stack([u for u, _ in row]) for row in want])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        weights, torch.stack([torch.stack([w for _, w in row], 1) for row in want])
    )
    leaves, noise = [query, *sources, *module.parameters()], torch.randn(B, TQ, D).double()
    got = torch.autograd.grad((result * noise).sum(), leaves, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad((expected * noise).sum(), leaves))
    steps = [module(query[:, t], module.prepare(sources, LENGTHS, mask), True) for t in range(TQ)]
    torch.testing.assert_close(torch.stack([x for x, _ in steps], 1), result)
    torch.testing.assert_close(torch.stack([w for _, w in steps], 2), weights)
    order = torch.tensor([2, 0, 0])
    torch.testing.assert_close(module(query[order], memory.index_select(order))[0], result[order])


def test_hops_that_cannot_be():
    with pytest.raises(ValueError, match="tying must be 'adjacent' or 'layer-wise', got 'rnn'"):
        MultiHopAttention(D, 3, "rnn")
    with pytest.raises(ValueError, match="hops must be at least 1, got 0"):
        MultiHopAttention(D, 0)
    module = MultiHopAttention(D, 3)
    with pytest.raises(ValueError, match="sources must be 4 tensors with adjacent tying, got 2"):
        module.prepare([torch.randn(B, TK, D)] * 2)
    with pytest.raises(ValueError, match=r"sources must be all of the same \[B, Tk, 6\], got a"):
        module.prepare([torch.randn(B, TK, D)] * 3 + [torch.randn(B, 2, D)])
    memory = module.prepare([torch.randn(B, TK, D)] * 4)
    with pytest.raises(ValueError, match=r"query must be \[3, 6\] or \[3, Tq, 6\] to fit the mem"):
        module(torch.randn(2, D), memory)
    with pytest.raises(TypeError, match=r"memory must be what prepare\(...\) returns"):
        module(torch.randn(B, D), torch.randn(B, TK, D))


# ---- the k best keys ----------------------------------------------------------------------------


ATTENTIONS = {
    "additive": lambda: BahdanauAttention(D, D, 5),
    "dot": lambda: LuongAttention(D, D, "dot"),
    "scaled dot": lambda: LuongAttention(D, D, "scaled_dot"),
    "general": lambda: LuongAttention(D, D, "general"),
    "concat": lambda: LuongAttention(D, D, "concat"),
}


@pytest.mark.parametrize("k", [1, 3, 9, 20])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_k_best_keys(name, k):
    """The softmax of the attention's own weights, cut to the k largest and put to a sum of 1."""
    torch.manual_seed(0)
    plain = ATTENTIONS[name]().double()
    module = TopKAttention(plain, k)
    states, values, query = double(B, TK, D), double(B, TK, 5), double(B, TQ, D)
    mask = torch.rand(B, TK) > 0.2
    for lengths, seen in ((None, None), (LENGTHS, None), (None, mask), (LENGTHS, mask)):
        memory = module.prepare(states, lengths, seen, values)
        context, weights = module(query, memory, need_weights=True)
        assert module(query, memory)[1] is None
        whole = plain(query, plain.prepare(states, lengths, seen, values), True)[1]
        best = whole.topk(min(k, TK)).indices
        kept = torch.zeros_like(whole).scatter(-1, best, 1) * whole
        expected = kept / kept.sum(-1, keepdim=True).clamp_min(1e-300)
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(context, expected @ values)
        leaves = [query, states, values, *plain.parameters()]
        noise = torch.randn(B, TQ, 5).double()
        got = torch.autograd.grad((context * noise).sum(), leaves)
        want = torch.autograd.grad((expected @ values * noise).sum(), leaves)
        torch.testing.assert_close(got, want)
        step = module(query[:, 1], memory, need_weights=True)
        torch.testing.assert_close(step[0], context[:, 1])
        torch.testing.assert_close(step[1], weights[:, 1])
        order = torch.tensor([2, 0, 0])
        again = module(query[order], memory.index_select(order))[0]
        torch.testing.assert_close(again, context[order])


def test_a_recurrent_layer_runs_it():
    torch.manual_seed(0)
    attention = ATTENTIONS["general"]()
    layer = AttentionGRU(4, D, D, TopKAttention(attention, TK))
    x, states = torch.randn(B, TQ, 4), torch.randn(B, TK, D)
    output, _ = layer(x, layer.prepare(states, LENGTHS))
    layer.attention = attention
    torch.testing.assert_close(output, layer(x, layer.prepare(states, LENGTHS))[0])


def test_attention_that_has_no_k_best():
    with pytest.raises(TypeError, match="attention must be a BahdanauAttention or LuongAttention"):
        TopKAttention(CoverageAttention(D, D, 5), 3)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        TopKAttention(ATTENTIONS["dot"](), 0)
    module = TopKAttention(ATTENTIONS["dot"](), 2)
    with pytest.raises(TypeError, match=r"memory must be what prepare\(...\) returns"):
        module(torch.randn(B, D), torch.randn(B, TK, D))
    with pytest.raises(ValueError, match=r"state must be \[3, 6\] or \[3, Tq, 6\]"):
        module(torch.randn(B, 5), module.prepare(torch.randn(B, TK, D)))
