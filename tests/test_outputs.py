"""What public functions return: a fixed number of items, and more by name."""

import copy
import pickle

import pytest
import torch

import attnfast
from attnfast import AttentionOutput, CoverageOutput, Span
from attnfast.decoding import attend, attend_with_history, prepare

Q, K, V = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 4)
W = torch.randn(8)
MEMORY = prepare(K, V, W)
ATTENTION = {
    "additive": lambda **flags: attnfast.additive_attention(Q, K, V, W, **flags),
    "dot": lambda **flags: attnfast.dot_attention(Q, K, V, **flags),
    "span": lambda **flags: attnfast.dot_attention(Q, K, V, span=Span(window=1), **flags),
    "strided": lambda **flags: attnfast.dot_attention(Q, K, V, span=Span(stride=2), **flags),
    "reference": lambda **flags: attnfast.dot_attention(Q, K, V, backend="reference", **flags),
    "memory": lambda **flags: attend(Q, MEMORY, **flags),
    "step": lambda **flags: attend(Q[:, :1], MEMORY, **flags),
    "memory, span": lambda **flags: attend(Q, MEMORY, span=Span(causal=True), **flags),
}
COVERAGE = {
    "coverage": lambda **flags: attnfast.coverage_attention(Q, K, V, W, penalty=1.0, **flags),
    "memory": lambda **flags: attend_with_history(Q, MEMORY, penalty=1.0, **flags),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    for need_weights in (False, True):
        result = ATTENTION[name](need_weights=need_weights)
        context, weights = result
        assert isinstance(result, AttentionOutput)
        assert result.context is context
        assert (weights is not None) == need_weights
        assert result.log_sum_exp.shape == context.shape[:-1]


@pytest.mark.parametrize("name", COVERAGE)
def test_coverage(name):
    for need_weights in (False, True):
        result = COVERAGE[name](need_weights=need_weights)
        context, weights, coverage = result
        assert isinstance(result, CoverageOutput)
        assert (weights is not None) == need_weights
        assert coverage.shape == (2, 5)
        assert result.loss.shape == (2,)
        assert context.shape == (2, 3, 4)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_keep_what_has_a_name(again):
    result = again(ATTENTION["additive"]())
    assert isinstance(result, AttentionOutput)
    assert torch.equal(result.log_sum_exp, ATTENTION["additive"]().log_sum_exp)


def test_a_graph_returns_one():
    compiled = torch.compile(ATTENTION["additive"], fullgraph=True, backend="aot_eager")
    result = compiled()
    assert isinstance(result, AttentionOutput)
    torch.testing.assert_close(result.log_sum_exp, ATTENTION["additive"]().log_sum_exp)


@pytest.mark.parametrize("cls", [attnfast.nn.BahdanauAttention, attnfast.nn.LuongAttention])
def test_a_backward_hook_sees_the_items(cls):
    """PyTorch makes what a module returns anew, ``type(result)(*items)``."""
    module, seen = cls(6, 6, attn_dim=8), []
    module.register_full_backward_hook(lambda _, grads, of_outputs: seen.append(of_outputs))
    states = torch.randn(2, 5, 6, requires_grad=True)
    context, weights = module(torch.randn(2, 6, requires_grad=True), module.prepare(states), True)
    (context.sum() + weights.square().sum()).backward()
    assert [x.shape for x in seen[0]] == [context.shape, weights.shape]
