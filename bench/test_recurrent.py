"""Times a recurrent decoder that attends, in one operator, against the loop that people write.

``torch.compile`` is the loop over a compiled step.
``nn.GRU`` over the same inputs, as wide, says what the recurrence alone costs there.
"""

import os
from unittest import mock

import pytest
import torch
from compare import DEVICE, DIRECTIONS, compare, timed
from peers import (
    additive,
    alike,
    decoder_step,
    eager,
    eager_with_history,
    keys_and_seen,
    run_steps,
)
from torch import Tensor, nn

from attnfast._utils.benchmark import memory_of
from attnfast.nn import (
    AttentionGRU,
    AttentionLSTM,
    BahdanauAttention,
    CoverageAttention,
    LocationAwareAttention,
)
from attnfast.nn import _fused_rnn as layer_code

SHAPES = {  # B, T, Tk, E, H, A; contexts have H features
    "small": (32, 20, 20, 128, 128, 128),
    "translation": (32, 50, 50, 256, 512, 512),
    "short sentences": (64, 25, 25, 256, 256, 256),
    "speech": (16, 100, 400, 256, 512, 512),
    "long sentences": (32, 100, 100, 512, 512, 512),
    "one sentence": (1, 50, 50, 256, 512, 512),
}


def without_graphs(call):
    """Return the call without CUDA graphs, by name, or nothing on a CPU."""

    def run():
        with mock.patch.dict(os.environ, ATTNFAST_CUDA_GRAPHS="0"):
            return call()

    return {"without CUDA graphs": run} if DEVICE.type == "cuda" else {}


LAYERS = {"GRU": (AttentionGRU, nn.GRUCell, nn.GRU), "LSTM": (AttentionLSTM, nn.LSTMCell, nn.LSTM)}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "recurrence"), [("GRU", "attend_first"), ("LSTM", "input_feeding")]
)
def test_recurrent(benchmark, kind, recurrence, shape, direction):
    B, T, Tk, E, H, A = SHAPES[shape]
    if kind == "LSTM" and shape not in ("translation", "one sentence"):
        pytest.skip("two shapes tell how the others would be")
    torch.manual_seed(0)
    ours, cell_of, plain_of = LAYERS[kind]
    attention = BahdanauAttention(H, H, A).to(DEVICE)
    layer = ours(E, H, H, attention, recurrence=recurrence).to(DEVICE)
    cell = cell_of(E + H, H).to(DEVICE)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(layer, f"{name}_l0"))
    plain = plain_of(E + H, H, batch_first=True).to(DEVICE)
    x, wide = (torch.randn(B, T, size, device=DEVICE) for size in (E, E + H))
    source = torch.randn(B, Tk, H, device=DEVICE, requires_grad=True)
    lengths = torch.randint(Tk // 2 + 1, Tk + 1, (B,), device=DEVICE)
    grad = torch.randn(B, T, H, device=DEVICE)

    def steps(step) -> Tensor:
        memory = keys_and_seen(attention, source, lengths)
        return run_steps(x, layer, cell, recurrence, step, *memory, source)

    def attend_alone() -> Tensor:
        step = decoder_step(layer, cell, recurrence, lambda h, memory: attention(h, memory)[0])
        return run_steps(x, layer, cell, recurrence, step, layer.prepare(source, lengths))

    torch._dynamo.reset()
    step = decoder_step(layer, cell, recurrence, additive(attention))
    compiled = torch.compile(step, dynamic=False)  # of all steps at once it takes minutes
    ways = {
        "attnfast": lambda: layer(x, layer.prepare(source, lengths)).output,
        "attention alone by attnfast": attend_alone,
        "eager": lambda: steps(step),
        "torch.compile": lambda: steps(compiled),
        f"nn.{kind} without attention": lambda: plain(wide)[0],
    }
    wanted = direction != "forward"
    leaves = {name: [source, *layer.parameters()] if wanted else None for name in ways}
    leaves[f"nn.{kind} without attention"] = list(plain.parameters()) if wanted else None
    calls = {name: timed(way, leaves[name], grad) for name, way in ways.items()}
    alike([calls[name] for name in list(ways)[:-1]])
    compare(benchmark, f"{kind}, {recurrence}", shape, SHAPES[shape], direction, calls)
    benchmark.extra_info["size_names"] = "B, T, Tk, E, H, A"
    if wanted:
        kept = {name: memory_of(way)[1] for name, way in ways.items()}
        benchmark.extra_info["kept"] = kept


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", ["small", "translation", "one sentence"])
def test_stack(benchmark, shape, direction):
    """Two layers with input feeding, the query the last one's state: OpenNMT's usual decoder."""
    B, T, Tk, E, H, A = SHAPES[shape]
    torch.manual_seed(0)
    attention = BahdanauAttention(H, H, A)
    options = {"recurrence": "input_feeding", "num_layers": 2, "query_layer": "last"}
    layer = AttentionLSTM(E, H, H, attention, **options).to(DEVICE)
    cells = [nn.LSTMCell(size, H, device=DEVICE) for size in (E + H, H)]
    for number, cell in enumerate(cells):
        for name, _ in [*cell.named_parameters()]:
            setattr(cell, name, getattr(layer, f"{name}_l{number}"))
    x, source = torch.randn(B, T, E, device=DEVICE), torch.randn(B, Tk, H, device=DEVICE)
    source.requires_grad_()
    lengths = torch.randint(Tk // 2 + 1, Tk + 1, (B,), device=DEVICE)
    grad = torch.randn(B, T, H, device=DEVICE)

    def steps(attend) -> Tensor:
        states, fed, outputs = [None, None], x.new_zeros(B, H), []
        for word in x.unbind(1):
            h = torch.cat([word, fed], -1)
            for number, cell in enumerate(cells):
                states[number] = cell(h, states[number])
                h = states[number][0]
            fed = torch.tanh(layer.output_proj(torch.cat([attend(h), h], -1)))
            outputs.append(fed)
        return torch.stack(outputs, 1)

    def fused() -> Tensor:
        memory = layer.prepare(source, lengths)
        return steps(lambda h: attention(h, memory)[0])

    ways = {
        "attnfast": lambda: layer(x, layer.prepare(source, lengths)).output,
        "attention alone by attnfast": fused,
        "eager": lambda: steps(eager(attention, source, lengths)),
    }
    leaves = [source, *layer.parameters()] if direction != "forward" else None
    calls = {name: timed(way, leaves, grad) for name, way in ways.items()}
    calls |= without_graphs(calls["attnfast"])
    alike(calls.values())
    compare(benchmark, "LSTM, two layers, input_feeding", shape, SHAPES[shape], direction, calls)
    benchmark.extra_info["size_names"] = "B, T, Tk, E, H, A"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", ["small", "translation", "one sentence"])
def test_bfloat16(benchmark, shape, direction):
    """A layer of bfloat16 beside the same in float32."""
    B, T, Tk, E, H, A = SHAPES[shape]
    torch.manual_seed(0)
    x, source = torch.randn(B, T, E, device=DEVICE), torch.randn(B, Tk, H, device=DEVICE)
    grad = torch.randn(B, T, H, device=DEVICE)
    calls = {}
    for name, dtype in (("attnfast, bfloat16", torch.bfloat16), ("float32", torch.float32)):
        torch.manual_seed(1)
        layer = AttentionGRU(E, H, H, BahdanauAttention(H, H, A)).to(DEVICE, dtype)
        words, states = x.to(dtype), source.to(dtype).requires_grad_()

        def run(layer=layer, words=words, states=states) -> Tensor:
            return layer(words, layer.prepare(states)).output

        leaves = [states, *layer.parameters()] if direction != "forward" else None
        calls[name] = timed(run, leaves, grad.to(dtype))
    half, whole = (call()[0].detach().float() for call in calls.values())
    assert float((half - whole).abs().max()) < 0.05
    compare(benchmark, "GRU, bfloat16", shape, SHAPES[shape], direction, calls)
    benchmark.extra_info["size_names"] = "B, T, Tk, E, H, A"


HISTORIES = {"location-aware": LocationAwareAttention, "coverage": CoverageAttention}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", ["small", "translation", "speech"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_with_a_history(benchmark, kind, shape, direction):
    """Against the layer's own loop, which serves what the operator has not."""
    B, T, Tk, E, H, A = SHAPES[shape]
    torch.manual_seed(0)
    attention = HISTORIES[kind](H, H, A)
    layer = AttentionGRU(E, H, H, attention).to(DEVICE)
    cell = nn.GRUCell(E + H, H).to(DEVICE)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(layer, f"{name}_l0"))
    x, source = torch.randn(B, T, E, device=DEVICE), torch.randn(B, Tk, H, device=DEVICE)
    source.requires_grad_()
    lengths = torch.randint(Tk // 2 + 1, Tk + 1, (B,), device=DEVICE)
    grad = torch.randn(B, T, H, device=DEVICE)

    def whole() -> Tensor:
        return layer(x, layer.prepare(source, lengths)).output

    def steps() -> Tensor:
        with mock.patch.object(layer_code, "select_layer_backend", return_value=(None, "")):
            return whole()

    def peer() -> Tensor:
        attend = eager_with_history(attention, source, lengths)
        step = decoder_step(layer, cell, "attend_first", attend)
        return run_steps(x, layer, cell, "attend_first", step)

    ways = {"attnfast": whole, "step by step": steps, "eager": peer}
    leaves = [source, *layer.parameters()] if direction != "forward" else None
    calls = {name: timed(way, leaves, grad) for name, way in ways.items()}
    calls |= without_graphs(calls["attnfast"])
    alike(calls.values())
    compare(benchmark, f"GRU, {kind}", shape, SHAPES[shape], direction, calls)
    benchmark.extra_info["size_names"] = "B, T, Tk, E, H, A"
