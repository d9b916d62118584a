"""Every public callable with sizes of 0; memory is full of large numbers before it is written."""

import os
import subprocess
import sys
from collections.abc import Iterator

import calls
import calls_of_models
import pytest
import torch
from test_nn_recurrent import ATTENTIONS
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnfast import nn as attn
from attnfast.nn import _fused_rnn as layer_code
from attnfast.nn.recurrent import RECURRENCES

#: glibc fills what it gives out with 0x7f: 3.4e38 as float32, 1.4e306 as float64.
POISON = "glibc.malloc.perturb=128:glibc.malloc.tcache_count=0"


@pytest.fixture(autouse=True)
def poison():
    """Fill what PyTorch itself gives out with NaN."""
    torch.use_deterministic_algorithms(True)  # which the filling waits for
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif("GLIBC_TUNABLES" in os.environ, reason="is this run")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for glibc")
def test_the_others_in_poisoned_memory():
    """The tests of this file once more, where what compiled code allocates is poisoned too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, "GLIBC_TUNABLES": POISON}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]


def is_clean(x: object) -> bool:
    """Return whether a result holds none of the poison."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return True
    return not x.isnan().any() and not (x.double() > 1e30).any()


PARTS = {
    "functions": calls.functions, "attentions": calls.attentions, "layers": calls.layers,
    "translators": calls_of_models.translators, "readers": calls_of_models.readers,
    "judges": calls_of_models.judges, "sounds": calls_of_models.sounds,
    "teachers": calls_of_models.teachers,
}  # fmt: skip
#: Parts that raise where a size is 0, because their modules or calls cannot be made.
NONE = {("layers", "B"), ("layers", "TK"), ("translators", "TK"), ("readers", "TK")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", ["B", "TQ", "TK"])
@pytest.mark.parametrize("part", PARTS)
def test_calls(part, size, monkeypatch):
    """Results and gradients hold what was computed, or one sentence says what does not fit."""
    torch.manual_seed(0)
    for module in (calls, calls_of_models):
        if hasattr(module, size):
            monkeypatch.setattr(module, size, 0)
    if (part, size) in NONE:
        with pytest.raises(ValueError, match="must be"):
            PARTS[part]()
        return
    assert any([judge_call(call) for call in PARTS[part]().values()])


def judge_call(call: calls.Call) -> bool:
    """Return whether a call computed anything; fail if it answered with what it did not compute."""
    leaves = list(tensors_of(call))
    try:
        results = tree_leaves(call.function(**call.arguments))
    except ValueError as error:
        if " must be " not in str(error):
            raise
        return False
    assert all(map(is_clean, results)), "a result"
    ends = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if ends and leaves:
        total = sum(x.masked_fill(x == -torch.inf, 0).sum() for x in ends)
        grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        assert all(map(is_clean, grads)), "a gradient"
    return True


def tensors_of(call: calls.Call) -> Iterator[Tensor]:
    """Yield the arguments and parameters of a call that gradients are taken of."""
    module = getattr(call.function, "__self__", call.function)
    if isinstance(module, torch.nn.Module):
        yield from module.parameters()
    for x in call.arguments.values():
        if isinstance(x, Tensor) and x.is_floating_point() and x.is_leaf:
            yield x.requires_grad_()


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
    serves = layer_code.select_layer_backend
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
        for way in (serves, lambda *_, **__: (None, "")):
            monkeypatch.setattr(layer_code, "select_layer_backend", way)
            x, source = leaf(B, T, 5), leaf(B, Tk, size)
            hx = [leaf(layer.num_layers, B, 12) for _ in range(1 + (layer.mode == "lstm"))]
            coupled = recurrence in ("attend_last", "input_feeding")
            feed = leaf(B, layer._fed) if coupled else None
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
            outputs += [] if after.history is None else after.history
            outputs = [y for y in outputs if isinstance(y, Tensor)]
            total = sum(y.nan_to_num(nan=torch.nan, neginf=0).sum() for y in outputs)
            grads = torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)
            found.append([y.detach() for y in (*outputs, *grads)])
            assert all(map(is_clean, found[-1])), (recurrence, B, T, Tk)
        torch.testing.assert_close(*found)
