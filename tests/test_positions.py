"""Positions, and a transformer's encoder: by formulas, by PyTorch's own layer, by permutations."""

import math

import pytest
import torch
from torch import nn

from attnfast import Span
from attnfast.decoding import greedy_search
from attnfast.models import Config, Encoder, TransformerEncoder, build
from attnfast.nn import (
    LearnedPositions,
    MultiHeadAttention,
    RelativePositions,
    SinusoidalPositions,
    SparseSelfAttention,
    TransformerEncoderLayer,
)

B, T, D, H = 2, 7, 8, 2
LENGTHS = torch.tensor([7, 4])


def states(dim=D):
    torch.manual_seed(0)
    return torch.randn(B, T, dim, dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 7, 8])
def test_sines_and_cosines(dim):
    x = states(dim)
    got = SinusoidalPositions()(x, offset=3) - x
    for t in range(T):
        for i in range(dim):
            angle = (3 + t) / 10000 ** (2 * (i // 2) / dim)
            want = math.sin(angle) if i % 2 == 0 else math.cos(angle)
            assert got[0, t, i].item() == pytest.approx(want, abs=1e-12)


def test_learned_positions():
    x, positions = states(), LearnedPositions(9, D).double()
    torch.testing.assert_close(positions(x, offset=2) - x, positions.weight[2:9].expand(B, T, D))


def relative():
    positions = RelativePositions(H, 2).double()
    nn.init.normal_(positions.weight)
    return positions


def test_relative_positions():
    positions = relative()
    got = positions(3, 5, offset=1)
    for h in range(H):
        for t in range(3):
            for j in range(5):
                apart = max(-2, min(2, j - (t + 1)))
                assert got[0, h, t, j] == positions.weight[h, apart + 2]


SPANS = {
    "all": [Span()] * H,
    "windows": [Span(window=2), Span(stride=2)],
    "causal": [Span(causal=True)] * H,
}


def scores_of(m, x, positions):
    """Return scores with positions, and values, ``[B, H, T, ·]``."""
    q, k, v = (
        proj(x).view(B, T, H, -1).transpose(1, 2)
        for proj in (m.query_proj, m.key_proj, m.value_proj)
    )
    return (q @ k.mT / (D // H) ** 0.5 + positions(T, T)) / m.temperature, v


def test_relative_positions_export_with_lengths_of_any_size():
    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            positions = RelativePositions(2, 3)
            self.attention = MultiHeadAttention(6, 6, 8, 2, positions=positions)

        def forward(self, state, source):
            return self.attention(state, self.attention.prepare(source))[0]

    module = Attend()
    of_batch, of_rows, of_keys = (torch.export.Dim(x, min=2, max=64) for x in "bqk")
    sizes = {0: of_batch, 1: of_rows}, {0: of_batch, 1: of_keys}
    program = torch.export.export(
        module, (torch.randn(2, 3, 6), torch.randn(2, 7, 6)), dynamic_shapes=sizes
    )
    args = torch.randn(4, 5, 6), torch.randn(4, 11, 6)
    torch.testing.assert_close(program.module()(*args), module(*args))


@pytest.mark.parametrize("heads", SPANS)
def test_relative_positions_in_self_attention(heads):
    positions, x = relative(), states().requires_grad_()
    m = SparseSelfAttention(D, SPANS[heads], positions=positions).double()
    out, weights = m(x, LENGTHS, need_weights="dense")
    t, j = torch.arange(T).view(-1, 1), torch.arange(T)
    seen = {
        "all": torch.ones(H, T, T, dtype=torch.bool),
        "windows": torch.stack([(j - t).abs() <= 2, (j - t) % 2 == 0]),
        "causal": (j <= t).expand(H, T, T),
    }[heads] & (j < LENGTHS.view(-1, 1, 1, 1))
    scores, v = scores_of(m, x, positions)
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(weights, want)
    result = m.out_proj((want @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, result)
    noise = torch.randn(B, T, D).double()
    there = [x, positions.weight]
    torch.testing.assert_close(
        torch.autograd.grad((out * noise).sum(), there),
        torch.autograd.grad((result * noise).sum(), there),
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_relative_positions_in_many_heads(temperature):
    positions, x = relative(), states()
    m = MultiHeadAttention(D, D, D, H, positions=positions).double()
    m.temperature = temperature
    memory = m.prepare(x, LENGTHS)
    context, weights = m(x, memory, need_weights=True)
    hidden = torch.arange(T) >= LENGTHS.view(-1, 1, 1, 1)
    want = scores_of(m, x, positions)[0].masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, want)
    for t in range(T):
        step = m(x[:, t], memory, offset=t)[0]
        torch.testing.assert_close(step, context[:, t])


def plain(kind):
    torch.manual_seed(1)
    if kind == "attention":
        attention = SparseSelfAttention(D, [Span()] * H).double()
        return lambda x: attention(x)[0]
    if kind == "relative":
        attention = SparseSelfAttention(D, [Span()] * H, positions=relative()).double()
        return lambda x: attention(x)[0]
    encoder = TransformerEncoder(D, D // 2, [Span()] * H, layers=2).double()
    if kind == "encoder without":
        encoder.positions = nn.Identity()
    return lambda x: encoder(x, torch.tensor([T, T]))


@pytest.mark.parametrize(
    ("kind", "alike"),
    [("attention", True), ("encoder without", True), ("relative", False), ("encoder", False)],
)
def test_what_is_permuted_is_permuted_alike(kind, alike):
    """Without positions self-attention cannot tell an order; with them it can."""
    run, x, order = plain(kind), states(), torch.randperm(T)
    same = torch.allclose(run(x[:, order]), run(x)[:, order], atol=1e-9)
    assert same == alike


def test_a_layer_is_pytorchs():
    torch.manual_seed(0)
    x = states()
    layer = TransformerEncoderLayer(SparseSelfAttention(D, [Span()] * H), 12).double()
    of_torch = nn.TransformerEncoderLayer(D, H, 12, 0.0, batch_first=True, norm_first=True).double()
    attention, of = layer.attention, of_torch.self_attn
    with torch.no_grad():
        projections = (attention.query_proj, attention.key_proj, attention.value_proj)
        of.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        of.out_proj.weight.copy_(attention.out_proj.weight)
        of.in_proj_bias.zero_()
        of.out_proj.bias.zero_()
    for mine, theirs in (
        (layer.feedforward[0], of_torch.linear1), (layer.feedforward[2], of_torch.linear2),
        (layer.norms[0], of_torch.norm1), (layer.norms[1], of_torch.norm2),
    ):  # fmt: skip
        nn.init.normal_(mine.weight)
        theirs.load_state_dict(mine.state_dict())
    hidden = torch.arange(T) >= LENGTHS[:, None]
    got, weights = layer(x, LENGTHS)
    want = of_torch(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(got[~hidden], want[~hidden])
    assert weights is None
    encoder = TransformerEncoder(D, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert encoder(x.bfloat16(), LENGTHS).isfinite().all()


@pytest.mark.parametrize("sparse", [False, True])
def test_an_encoder_of_a_translator(sparse):
    torch.manual_seed(0)
    config = Config(30, "bahdanau", embed_dim=6, hidden_dim=8, layers=2, encoder="transformer",
                    self_attention=sparse, window=1, stride=3)  # fmt: skip
    model = build(config).eval()
    assert isinstance(model.encoder, TransformerEncoder) and model.encoder.output_dim == 16
    heads = model.encoder.layers[1].attention.heads
    assert heads == ([Span(window=1)] * 2 + [Span(stride=3)] * 2 if sparse else [Span()] * 4)
    source, lengths = torch.randint(4, 30, (3, 9)), torch.tensor([9, 5, 1])
    assert len(greedy_search(model, source, lengths).best) == 3
    assert isinstance(build(Config(30, hidden_dim=8)).encoder, Encoder)
    assert TransformerEncoder(6, 3, [Span()] * 3).output_dim == 6
