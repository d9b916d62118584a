"""Times windows and strides on long sequences: what a key seen costs, and what others pay."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from compare import DEVICE, DIRECTIONS, compare, timed
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnfast
from attnfast import Span
from attnfast.ops.backends import select_backend

A = 64  # features of queries, keys and values
SPANS = {
    "window 5": Span(window=5),
    "window 128": Span(window=128),
    "stride 8": Span(stride=8),
    "stride 64": Span(stride=64),
}
LENGTHS = (512, 4096, 32768, 131072)
MOST = {  # the longest sequence that a contender is asked for: 23 GiB of memory, and patience
    ("dense", "dot"): 32768,
    ("dense", "additive"): 32768,
    ("eager", "dot"): 4096,
    ("eager", "additive"): 512,
    ("masked SDPA", "dot"): 4096,
    ("FlexAttention", "dot"): 32768,
}


def mask_of(T: int, span: Span) -> torch.Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool, device=DEVICE)
    keys = span.key_indices(T, T, device=DEVICE)
    rows = torch.arange(T, device=DEVICE).unsqueeze(-1).expand_as(keys)[keys >= 0]
    mask[rows, keys[keys >= 0]] = True
    return mask


def eager(query, key, value, score_vector, mask):
    """Attend as people write it, with a mask."""
    if score_vector is None:
        score = query @ key.transpose(-1, -2) / A**0.5
    else:
        score = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ score_vector
    return score.masked_fill(~mask, -math.inf).softmax(-1) @ value


def contenders(score: str, T: int, direction: str) -> dict:
    """Return what runs at this length: name to a function of query, key, value and weight."""

    def ours(span):
        def run(query, key, value, score_vector):
            if score_vector is None:
                return attnfast.dot_attention(query, key, value, span=span)[0]
            return attnfast.additive_attention(query, key, value, score_vector, span=span)[0]

        return run

    ways = {name: ours(span) for name, span in SPANS.items()}
    ways["dense"] = ours(None)
    window = SPANS["window 5"]
    mask = mask_of(T, window) if T <= 4096 else None
    ways["eager"] = lambda q, k, v, w: eager(q, k, v, w, mask)
    ways["masked SDPA"] = lambda q, k, v, w: F.scaled_dot_product_attention(
        *(x.unsqueeze(1) for x in (q, k, v)), attn_mask=mask
    ).squeeze(1)
    if direction == "forward":  # on a CPU it has no backward
        near = lambda b, h, i, j: (i - j).abs() <= 5  # noqa: E731
        blocks = None
        if score == "dot" and MOST["FlexAttention", "dot"] >= T:
            blocks = torch.compile(create_block_mask)(near, None, None, T, T, device=DEVICE)
        flex = torch.compile(flex_attention)
        ways["FlexAttention"] = lambda q, k, v, w: flex(
            *(x.unsqueeze(1) for x in (q, k, v)), block_mask=blocks
        ).squeeze(1)
    if direction != "forward":
        if T > 32768:  # weights and their gradient would take 16 GiB
            del ways["stride 8"]
        if T > 4096 and score == "additive":  # 20 s a call
            del ways["dense"]
    never = 0 if score == "additive" else math.inf
    dot_only = ("masked SDPA", "FlexAttention")
    return {
        name: way
        for name, way in ways.items()
        if MOST.get((name, score), never if name in dot_only else math.inf) >= T
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("score", ["dot", "additive"])
def test_spans(benchmark, score, T, direction):
    torch.manual_seed(0)
    torch._dynamo.reset()
    grad = direction != "forward"
    args = [torch.randn(1, T, A, device=DEVICE) for _ in range(3)]
    args.append(torch.randn(A, device=DEVICE) * 2 / A**0.5 if score == "additive" else None)
    leaves = [x.requires_grad_() for x in args if x is not None] if grad else None
    ways = contenders(score, T, direction)
    with torch.no_grad():  # correct first, on as many rows as float64 has room for
        some = slice(0, 512)
        cut = [None if x is None else (x if x.dim() == 1 else x[:, some]).double() for x in args]
        for name, span in SPANS.items():
            if name not in ways:
                continue
            want = eager(*cut, mask_of(512, span))
            got = ways[name](*(x if x is None else x.float() for x in cut))
            assert float((got - want).abs().max()) <= 1e-5, name
    benchmark.group = f"spans, {score}"
    keys = {name: SPANS[name].columns(T) if name in SPANS else T for name in ways}
    benchmark.extra_info["keys"] = keys
    calls = {name: timed(lambda way=way: way(*args), leaves) for name, way in ways.items()}
    compare(benchmark, f"spans, {score} score", f"T = {T}", (1, T, T, A, A), direction, calls)
    benchmark.extra_info["backend"] = select_backend(None, DEVICE, torch.float32)


PATTERNS = (32, 8, 512, 64)  # B, H, T, features of a head


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_patterns(benchmark, direction):
    """Full, local, strided and both side by side, the heads of one layer."""
    torch.manual_seed(0)
    B, H, T, D = PATTERNS
    grad = direction != "forward"
    args = [torch.randn(B, H, T, D, device=DEVICE).requires_grad_(grad) for _ in range(3)]
    local, strided = Span(window=5), Span(stride=8)
    heads = {
        "local, radius 5": [local] * H,
        "strided, 8": [strided] * H,
        "both, 4 heads each": [local, strided] * (H // 2),
        "full": None,
    }
    masks = {
        name: None if spans is None else torch.stack([mask_of(T, span) for span in spans])
        for name, spans in heads.items()
    }

    def masked(mask, query, key, value):
        score = query @ key.transpose(-1, -2) / D**0.5
        score = score if mask is None else score.masked_fill(~mask, -math.inf)
        return score.softmax(-1) @ value

    ways = {
        name: lambda *args, spans=spans: attnfast.dot_attention(*args, span=spans)[0]
        for name, spans in heads.items()
    }
    with torch.no_grad():
        some = [x[:1] for x in args]
        for name, way in ways.items():
            want = masked(masks[name], *(x.double() for x in some))
            assert float((way(*some) - want).abs().max()) <= 1e-5, name
    ways["eager, full"] = lambda *args: masked(None, *args)
    mask = masks["both, 4 heads each"]
    ways["eager, both"] = lambda *args: masked(mask, *args)
    seen = {"local, radius 5": 11, "strided, 8": 64, "both, 4 heads each": 37.5}
    benchmark.extra_info["keys"] = {name: seen.get(name, T) for name in ways}
    benchmark.group = "patterns"
    leaves = args if grad else None
    calls = {name: timed(lambda way=way: way(*args), leaves) for name, way in ways.items()}
    compare(benchmark, "patterns of heads", f"T = {T}", PATTERNS, direction, calls)
