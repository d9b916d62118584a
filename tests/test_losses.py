"""Losses on attention weights, in a span's columns as on dense weights."""

import pytest
import torch

import attnfast
from attnfast import Span, alignment_loss

B, TQ, TK = 2, 6, 9


def given(heads, form):
    """Weights of a window, in its columns and dense, and an alignment, partly outside of it."""
    g = torch.Generator().manual_seed(heads)
    lead = (B, heads) if heads else (B,)
    query, key, value = (
        torch.randn(*lead, T, 4, generator=g, dtype=torch.float64, requires_grad=True)
        for T in (TQ, TK, TK)
    )
    span = Span(window=(1, 3))
    lengths = torch.tensor([TK, 5])
    both = [
        attnfast.dot_attention(query, key, value, span=span, lengths=lengths, need_weights=form)[1]
        for form in (True, "dense")
    ]
    keys = span.key_indices(TQ, TK, lengths=lengths)
    keys = keys.unsqueeze(1) if heads else keys
    if form == "keys":
        alignment = torch.randint(-1, TK, (*lead, TQ), generator=g)
    else:
        alignment = torch.rand(*lead, TQ, TK, generator=g, dtype=torch.float64).square()
        alignment = alignment * (alignment > 0.3)
    return query, *both, keys, alignment


@pytest.mark.parametrize("kind", ["cross_entropy", "squared"])
@pytest.mark.parametrize("form", ["keys", "numbers", "sparse"])
@pytest.mark.parametrize("heads", [0, 3])
def test_formula(heads, form, kind):
    query, columns, dense, keys, alignment = given(heads, form)
    if form == "keys":
        exists = alignment >= 0
        target = torch.nn.functional.one_hot(alignment.clamp_min(0), TK).double()
    else:
        exists, target = torch.ones(alignment.shape[:-1], dtype=torch.bool), alignment
    if kind == "squared":
        want = 0.5 * (dense - target).square().sum(-1)
    else:
        want = -(target * dense.clamp_min(1e-8).log()).sum(-1)
    want = want * exists
    alignment = alignment.to_sparse() if form == "sparse" else alignment
    for weights, of in ((columns, keys), (dense, None)):
        got = alignment_loss(weights, alignment, key_indices=of, kind=kind)
        torch.testing.assert_close(got, want)
        grad = torch.autograd.grad(got.sum(), query, retain_graph=True)[0]
        torch.testing.assert_close(
            grad, torch.autograd.grad(want.sum(), query, retain_graph=True)[0]
        )


def test_as_many_columns_as_keys():
    """A dense alignment is one of keys, whatever the number of columns."""
    query = torch.randn(1, 5, 4)
    span = Span(window=2)
    columns, dense = (
        attnfast.dot_attention(query, query, query, span=span, need_weights=form)[1]
        for form in (True, "dense")
    )
    target = torch.rand(1, 5, 5)
    got = alignment_loss(columns, target, key_indices=span.key_indices(5, 5), kind="squared")
    torch.testing.assert_close(got, alignment_loss(dense, target, kind="squared"))


def test_keys_without_the_axis_of_the_heads():
    _, columns, dense, keys, alignment = given(B, "keys")
    got = alignment_loss(columns, alignment, key_indices=keys.squeeze(1))
    torch.testing.assert_close(got, alignment_loss(dense, alignment))


def test_half_types_are_taken_wider():
    weights = torch.tensor([[[1.0, 0.0, 0.0]]]).half().requires_grad_()
    for alignment in (torch.tensor([[1]]), torch.tensor([[[1.0, 0.0, 0.0]]])):
        loss = alignment_loss(weights, alignment)
        assert loss.dtype == torch.float32
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), weights)[0].isfinite().all()
