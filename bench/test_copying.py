"""Times the pointer-generator's distribution against the lines that people write for it."""

from __future__ import annotations

import pytest
import torch
from compare import DEVICE, DIRECTIONS, compare, fused, timed

import attnfast

SHAPES = {  # B, Tq, Tk, V, X
    "summarisation": (8, 50, 400, 50_000, 40),
    "data to text": (32, 30, 40, 3_000, 8),
    "a step of a search": (40, 1, 400, 50_000, 40),
}


def eager(logits, weights, source, gate, num_oov):
    """See et al. (2017) as their code and its descendants compute it."""
    p = gate.sigmoid().unsqueeze(-1)
    words = torch.cat([p * logits.softmax(-1), p.new_zeros(*p.shape[:2], num_oov)], -1)
    index = source.unsqueeze(1).expand(weights.shape)
    return words.scatter_add(-1, index, (1 - p) * weights)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["probabilities", "logarithms"])
def test_copying(benchmark, form, shape, direction):
    """With a loss: that of the target's words, as in training."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    B, Tq, Tk, V, X = SHAPES[shape]
    logits, gate = torch.randn(B, Tq, V, device=DEVICE), torch.randn(B, Tq, device=DEVICE)
    weights = torch.randn(B, Tq, Tk, device=DEVICE).softmax(-1)
    source = torch.randint(0, V + X, (B, Tk), device=DEVICE)
    target = source[:, :1].expand(B, Tq).unsqueeze(-1)
    backward = direction != "forward"
    leaves = [x.requires_grad_() for x in (logits, weights, gate)] if backward else None
    args = (logits, weights, source, gate, X)
    log = form == "logarithms"

    def ours(logits, weights, source, gate, num_oov, backend):
        return attnfast.copy_distribution(
            logits, weights, source, gate, num_oov=num_oov, log=log, backend=backend
        )

    def as_asked(way):
        return lambda *args: way(*args).log() if log else way(*args)

    ways = fused(ours, "copy_distribution")
    with torch.no_grad():
        exact = eager(logits.double(), weights.double(), source, gate.double(), X)
        allowed = max(1e-6, 2 * float((eager(*args) - exact).abs().max()))
        for way in ways.values():
            got = way(*args).double()
            assert float(((got.exp() if log else got) - exact).abs().max()) <= allowed
    ways["eager"] = as_asked(eager)
    ways["torch.compile"] = as_asked(torch.compile(eager, dynamic=False))

    def call(way):
        def run():
            out = way(*args)
            return out.gather(-1, target) if backward else out

        return timed(run, leaves)

    benchmark.group = f"copying, {form}"
    benchmark.extra_info["size_names"] = "B, Tq, Tk, V, X"
    calls = {name: call(way) for name, way in ways.items()}
    compare(benchmark, benchmark.group, shape, SHAPES[shape], direction, calls)
