"""Times attnfast against the attention modules of real toolkits: same weights, same tensors.

A recurrent decoder attends step by step, as the toolkits' own decoders do. They are not installed
with attnfast: `make integrations` installs what their attention needs.
"""

import pytest
import torch
from compare import DECODERS, DEVICE, DIRECTIONS, compare, timed

from attnfast.nn import BahdanauAttention


def attnfast(ours, source):
    memory = ours.prepare(source, torch.full((source.shape[0],), source.shape[1]))
    return lambda state: ours(state, memory)[0]


def espnet(ours):
    """Watanabe et al., "ESPnet: End-to-End Speech Processing Toolkit", Interspeech 2018."""
    attentions = pytest.importorskip("espnet2.legacy.nets.pytorch_backend.rnn.attentions")
    theirs = attentions.AttAdd(
        ours.key_proj.in_features, ours.query_proj.in_features, len(ours.score_vector)
    )
    theirs.mlp_enc.weight, theirs.mlp_dec.weight = ours.key_proj.weight, ours.query_proj.weight
    theirs.gvec.weight = torch.nn.Parameter(ours.score_vector[None].detach())
    for bias in (theirs.mlp_enc.bias, theirs.gvec.bias):
        torch.nn.init.zeros_(bias)

    def start(source):
        theirs.reset()
        lengths = [source.shape[1]] * source.shape[0]
        return lambda state: theirs(source, lengths, state, None, scaling=1.0)[0]

    return start, theirs.gvec.weight


def joeynmt(ours):
    """Kreutzer, Bastings and Riezler, "Joey NMT", EMNLP 2019, arXiv:1907.12484."""
    attention = pytest.importorskip("joeynmt.attention")
    features, query_dim = ours.query_proj.weight.shape
    theirs = attention.BahdanauAttention(features, ours.key_proj.in_features, query_dim)
    theirs.key_layer.weight, theirs.query_layer.weight = (
        ours.key_proj.weight,
        ours.query_proj.weight,
    )
    theirs.energy_layer.weight = torch.nn.Parameter(ours.score_vector[None].detach())

    def start(source):
        theirs.compute_proj_keys(source)
        mask = torch.ones(source.shape[0], 1, source.shape[1], dtype=torch.bool)

        return lambda state: theirs(state.unsqueeze(1), mask, source)[0].squeeze(1)

    return start, theirs.energy_layer.weight


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", DECODERS)
@pytest.mark.parametrize("toolkit", [espnet, joeynmt], ids=lambda f: f.__name__)
def test_toolkit(benchmark, toolkit, shape, direction):
    if DEVICE.type != "cpu":
        pytest.skip("lengths and masks are made on the CPU")
    B, steps, Tk, A, D = DECODERS[shape]
    torch.manual_seed(0)
    ours = BahdanauAttention(D, D, A)
    theirs, their_weight = toolkit(ours)
    source, states = torch.randn(B, Tk, D, requires_grad=True), torch.randn(B, steps, D)

    def decode(start):
        step, context, contexts = start(source), 0, []
        for state in states.unbind(1):
            context = step(state + context)
            contexts.append(context)
        return torch.stack(contexts, 1)

    grad, projections = (
        torch.randn(B, steps, D),
        [m.weight for m in (ours.query_proj, ours.key_proj)],
    )

    def run(start, weight):
        leaves = [source, *projections, weight] if direction != "forward" else None
        return timed(lambda: decode(start), leaves, grad)

    calls = {
        "attnfast": run(lambda x: attnfast(ours, x), ours.score_vector),
        toolkit.__name__: run(theirs, their_weight),
    }
    for got, want in zip(*(call() for call in calls.values())):
        scale = float(want.detach().abs().max())
        torch.testing.assert_close(
            got.detach(), want.detach().view_as(got), rtol=0, atol=1e-4 * scale
        )
    compare(benchmark, f"beside {toolkit.__name__}", shape, DECODERS[shape], direction, calls)
