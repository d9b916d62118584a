"""Layers, models and searches with sizes of 0; memory is full of NaN before it is written."""

import pytest
import torch
from test_nn_recurrent import ATTENTIONS
from test_recurrent import RECURRENCES
from torch import Tensor

from attnfast import nn as attn
from attnfast.nn import layer as layer_code


@pytest.fixture(autouse=True)
def poison():
    """Fill every new tensor with NaN."""
    torch.use_deterministic_algorithms(True)  # which the filling waits for
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


LAYERS = {
    "GRU": (attn.AttentionGRU, {}),
    "LSTM": (attn.AttentionLSTM, {}),
    "layers above": (attn.AttentionLSTM, {"num_layers": 2}),
    "stack": (attn.AttentionGRU, {"num_layers": 2, "query_layer": "last"}),
}


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, attention, monkeypatch):
    """No sentence, no step, no key: shapes as ever, and the same numbers in both ways."""
    torch.manual_seed(0)
    size = 12 if attention == "dot" else 10
    feeds, (kind, options) = kind != "layers above", LAYERS[kind]
    serves = layer_code.backend_of
    sizes = [(x, 2, 0, 4) for x in RECURRENCES] + [
        ("attend_last", 0, 3, 4),
        ("attend_last", 2, 3, 0),
    ]
    for recurrence, B, T, Tk in sizes:
        if recurrence == "input_feeding" and not feeds:
            continue
        layer = kind(5, 12, size, ATTENTIONS[attention](), recurrence=recurrence, **options)
        layer = layer.double()
        F = layer.output_size
        found = []
        for way in (serves, lambda *_, **__: None):
            monkeypatch.setattr(layer_code, "backend_of", way)
            x, source = leaf(B, T, 5), leaf(B, Tk, size)
            hx = [leaf(layer.num_layers, B, 12) for _ in range(1 + (layer.mode == "lstm"))]
            feed = None if recurrence == "attend_first" else leaf(B, layer._fed)
            state = attn.RecurrentState(hx[0], hx[1] if hx[1:] else None, feed)
            result = layer(x, layer.prepare(source), state, need_weights=True)
            after = result.state
            assert result.output.shape == (B, T, F)
            assert result.states.shape == (B, T, 12)
            assert result.contexts.shape == (B, T, layer.context_size)
            assert after.hidden.shape == hx[0].shape
            assert (after.cell is None) == (layer.mode != "lstm")
            given = [x, source, *hx, *([] if feed is None else [feed]), *layer.parameters()]
            outputs = [result.output, result.contexts, result.weights, after.hidden, after.feed]
            outputs += [after.cell]
            if isinstance(after.history, attn.History):  # whose loss may be None for 0
                outputs += after.history._replace(loss=None)
            outputs = [y for y in outputs if isinstance(y, Tensor)]
            total = sum(y.nan_to_num(nan=torch.nan, neginf=0).sum() for y in outputs)
            grads = torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)
            found.append([y.detach() for y in (*outputs, *grads)])
            assert not any(y.isnan().any() for y in found[-1]), (recurrence, B, T, Tk)
        torch.testing.assert_close(*found)
