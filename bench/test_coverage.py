"""Times attention with a history against the loops that people write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, DIRECTIONS, compare, fused, timed

import attnfast

WHOLE = {  # B, Tq, Tk, A, Dv
    "summarisation": (16, 100, 400, 256, 512),
    "translation": (32, 50, 50, 512, 512),
    "one sentence": (1, 50, 50, 256, 256),
}
STEPS = {  # B, Tk, A, Dv, filters, width
    "speech": (32, 400, 128, 512, 32, 31),
    "synthesis": (16, 150, 128, 512, 32, 31),
    "one sentence": (1, 100, 128, 256, 32, 31),
}


def loop(query, key, value, score_vector, penalty=None, coverage_weight=None):
    """Attend row after row: context and coverage loss."""
    coverage, contexts, loss = key.new_zeros(key.shape[:2]), [], 0
    for q in query.unbind(1):
        features = q.unsqueeze(1) + key
        if coverage_weight is not None:
            features = features + coverage.unsqueeze(-1) * coverage_weight
        score = torch.tanh(features) @ score_vector
        if penalty is not None:
            score = score - penalty * coverage
        weights = score.softmax(-1)
        contexts.append(torch.bmm(weights.unsqueeze(1), value).squeeze(1))
        loss = loss + torch.minimum(weights, coverage).sum(-1)
        coverage = coverage + weights
    return torch.stack(contexts, 1), loss


def whole_target(query, key, value, score_vector, **options):
    result = attnfast.coverage_attention(query, key, value, score_vector, **options)
    return result.context, result.loss


def location_step(query, key, value, score_vector, filters, projection, previous):
    """Attend once, location features in the tanh: context and weights."""
    found = F.conv1d(previous.unsqueeze(1), filters, padding=filters.shape[-1] // 2)
    features = query + key + found.transpose(1, 2) @ projection.T
    weights = (torch.tanh(features) @ score_vector).softmax(-1)
    return torch.bmm(weights.unsqueeze(1), value), weights


def one_step(query, key, value, score_vector, **options):
    context, weights, _ = attnfast.coverage_attention(
        query, key, value, score_vector, need_weights=True, **options
    )
    return context, weights.squeeze(1)


def measure(benchmark, shape, sizes, direction, ways, args) -> None:
    """Compare attnfast's ways with the float64 loop, then time the first against the others."""
    backward = direction != "forward"
    leaves = [x.requires_grad_() for x in args.values()] if backward else None

    def call(way):
        def run():
            outputs = way(**args)
            return sum(x.sum() for x in outputs) if backward else outputs

        return timed(run, leaves)

    eager = ways["eager"]
    with torch.no_grad():
        exact = eager(**{k: v.double() for k, v in args.items()})
        for way in (way for name, way in ways.items() if name.startswith("attnfast")):
            for got, plain, want in zip(way(**args), eager(**args), exact):
                allowed = max(1e-5, 2 * float((plain - want).abs().max()))
                assert float((got - want).abs().max()) <= allowed
    calls = {name: call(way) for name, way in ways.items()}
    compare(benchmark, benchmark.group, shape, sizes, direction, calls)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("term", ["penalty", "coverage_weight"])
def test_whole_target(benchmark, term, shape, direction):
    torch.manual_seed(0)
    B, Tq, Tk, A, Dv = WHOLE[shape]
    rows = {"query": (B, Tq, A), "key": (B, Tk, A), "value": (B, Tk, Dv)}
    args = {k: torch.randn(size, device=DEVICE) for k, size in rows.items()}
    args["score_vector"] = torch.randn(A, device=DEVICE) * 2 / A**0.5
    own = {"penalty": torch.ones(1), "coverage_weight": torch.randn(A) / 4}
    args[term] = own[term].to(DEVICE)
    what = {"penalty": "coverage penalty", "coverage_weight": "coverage in the tanh"}
    benchmark.group = f"{what[term]}, whole targets"
    ways = {**fused(whole_target, "coverage_attention"), "eager": loop}
    measure(benchmark, shape, WHOLE[shape], direction, ways, args)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", STEPS)
def test_location_step(benchmark, shape, direction):
    torch.manual_seed(0)
    torch._dynamo.reset()
    B, Tk, A, Dv, K, W = STEPS[shape]
    rows = {"query": (B, 1, A), "key": (B, Tk, A), "value": (B, Tk, Dv)}
    args = {k: torch.randn(size, device=DEVICE) for k, size in rows.items()}
    args["score_vector"] = torch.randn(A, device=DEVICE) * 2 / A**0.5
    args["filters"] = torch.randn(K, 1, W, device=DEVICE) / W**0.5
    args["projection"] = torch.randn(A, K, device=DEVICE) / K**0.5
    args["previous"] = torch.randn(B, Tk, device=DEVICE).softmax(-1)
    benchmark.group = f"location features, a step, {K} filters of width {W}"
    ways = {
        **fused(one_step, "coverage_attention", step=True),
        "eager": location_step,
        "torch.compile": torch.compile(location_step, dynamic=False),
    }
    measure(benchmark, shape, (B, 1, Tk, A, Dv), direction, ways, args)
