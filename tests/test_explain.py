"""attnfast.explain and ATTNFAST_LOG: what ran a call, and why not something faster."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from integrations import reference_projects
from torch import nn

import attnfast
from attnfast.decoding import beam_search, greedy_search
from attnfast.models import Config, build
from attnfast.nn import AttentionGRU, BahdanauAttention, GatedAttention, HardAttention
from attnfast.nn._fused_rnn import run_rnn
from attnfast.nn._linear import linear
from attnfast.ops.backends import reasons_against, unsupported_reason

pytestmark = pytest.mark.skipif(
    unsupported_reason("cpu", torch.device("cpu"), torch.float32) is not None, reason="no _C_cpu"
)
X, LENGTHS = torch.ones(2, 3, 8), torch.tensor([3, 2])
WORDS = torch.full((2, 3), 5)


def choices(function, *args, **kwargs):
    """Return what ran each operation and the reasons, the last of each operation."""
    found = attnfast.explain(function, *args, **kwargs)
    return {x.operation: (x.ran, " ".join(x.reasons)) for x in found.choices}


def test_a_backend():
    found = attnfast.explain(attnfast.dot_attention, X, X, X)
    assert [x[:2] for x in found.choices] == [("attention", "cpu")]
    assert str(found).startswith("attention: cpu\n    not cuda: torch sees no CUDA device")
    assert torch.equal(found.output[0], attnfast.dot_attention(X, X, X)[0])
    named = attnfast.explain(attnfast.dot_attention, X, X, X, backend="reference")
    assert str(named) == "attention: reference, as requested"


def test_reasons_are_those_against_better_backends():
    cpu = torch.device("cpu")
    assert reasons_against("cuda", cpu, torch.float32) == ()  # it ranks first
    [reason, *_] = reasons_against("cpu", cpu, torch.float32)
    assert reason.startswith("not cuda: ")
    layer = AttentionGRU(8, 8, 8, BahdanauAttention(8, 8, 8))
    found = attnfast.explain(layer, X, layer.prepare(X))
    assert [x.reasons for x in found.choices if x.operation == "recurrent layer"] == [()]


def test_a_step_over_a_prepared_memory():
    attention = BahdanauAttention(8, 8, 8)
    assert choices(attention, X[:, 0], attention.prepare(X))["attention"] == ("cpu", "")


ALL, EACH = "once, after the backward of all steps", "at every step"


@pytest.mark.parametrize(
    ("change", "when", "reason"),
    [
        (lambda m: m, ALL, ""),
        (
            lambda m: m.index_select(torch.tensor([1, 0])),
            EACH,
            "without gradients, appended to, or reord",
        ),
        (lambda m: m._replace(key=m.key * 1), EACH, "the memory's tensors were replaced"),
        (lambda m: m._replace(shared_keys=None), EACH, "in a compiled graph"),
    ],
)
def test_when_the_gradients_of_keys_are_computed(change, when, reason):
    memory = change(attnfast.prepare(X.clone().requires_grad_(), X))
    ran, why = choices(attnfast.attend, X[:, :1], memory)["gradients of keys"]
    assert ran == when and reason in why and bool(reason) == bool(why)
    zeros = torch.zeros(2, 3)
    ran = choices(attnfast.decoding.attend_with_history, X[:, :1], memory, coverage=zeros)
    assert ran["gradients of keys"] == (when, why)


def test_gradients_of_keys_at_every_step():
    X1, keys = X[:, :1], X.clone().requires_grad_()
    memory = attnfast.prepare(keys, X)
    strided = {"span": attnfast.Span(stride=2), "position": 0}
    assert "has a stride" in choices(attnfast.attend, X1, memory, **strided)["gradients of keys"][1]
    with torch.autograd.graph.save_on_cpu():
        found = choices(attnfast.attend, X1, memory)
    assert "saved-tensor hooks" in found["gradients of keys"][1]
    plain = attnfast.prepare(keys, X, backend="reference")
    assert "reference" in choices(attnfast.attend, X1, plain)["gradients of keys"][1]
    # without such gradients there is no decision
    assert "gradients of keys" not in choices(attnfast.attend, X1, attnfast.prepare(X, X))
    assert "gradients of keys" not in choices(attnfast.attend, X, memory)
    with torch.no_grad():
        assert "gradients of keys" not in choices(attnfast.attend, X1, memory)


def test_an_append():
    memory, row = attnfast.prepare(X, X), X[:, 0]
    one = memory.append(row, row)
    two = one.append(row, row)
    three = two.append(row, row)
    full = three
    while full.key.shape[1] < 10:  # the capacity that the second append allocated
        full = full.append(row, row)
    for m, reason in (
        (memory, "no buffer before the first append"), (one, "no spare rows yet"),
        (two, "not the newest"), (full, "full"),
    ):  # fmt: skip
        ran, why = choices(m.append, row, row)["append"]
        assert ran == "a copy of all keys" and reason in why
    assert choices(two.append(row, row).append, row, row)["append"] == ("in place", "")


def test_what_is_not_called_or_not_recorded():
    with pytest.raises(TypeError, match=r"^function must be callable, got 3$"):
        attnfast.explain(3)
    assert str(attnfast.explain(len, "abc")).startswith("attnfast was not called")
    with pytest.raises(ValueError, match="query"):
        attnfast.explain(attnfast.dot_attention, X[0], X, X)
    found = attnfast.explain(linear, X, torch.ones(1, 8))
    attnfast.dot_attention(X, X, X)  # after the call that is explained
    assert [x.operation for x in found.choices] == ["linear"]
    assert attnfast.explain(len, "").choices == []


def test_one_in_the_other():
    inner = []

    def outer():
        attnfast.dot_attention(X, X, X)
        inner.append(attnfast.explain(attnfast.dot_attention, X, X, X, backend="reference"))

    found = attnfast.explain(outer)
    assert [x.ran for x in inner[0].choices] == ["reference, as requested"]
    assert [x.ran for x in found.choices] == ["cpu", "reference, as requested"]
    assert str(attnfast.explain(lambda: [linear(X, torch.ones(1, 8)) for _ in range(3)])) == (
        "linear: PyTorch (3 times)\n    PyTorch is as fast for few rows or small weights"
    )


def hooked(layer):
    layer.attention.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("change", "ran", "reason"),
    [
        (lambda layer: layer, "one operator on cpu", ""),
        (hooked, "step by step", "BahdanauAttention has hooks or a forward of its own"),
        (
            lambda layer: hooked(AttentionGRU(8, 8, 8, GatedAttention(layer.attention, 8))),
            "step by step",
            "GatedAttention or its gate has hooks or a forward of its own",
        ),
        (
            lambda layer: AttentionGRU(8, 8, 8, HardAttention(layer.attention)),
            "step by step",
            "no operator supports HardAttention",
        ),
    ],
)
def test_a_recurrent_layer(change, ran, reason):
    layer = change(AttentionGRU(8, 8, 8, BahdanauAttention(8, 8, 8)))
    got = choices(layer, X, layer.prepare(X, LENGTHS))["recurrent layer"]
    assert got[0] == ran and got[1].startswith(reason)


def test_a_recurrent_layer_under_autocast():
    """The operator takes bfloat16, but no float16 and no single step, whose weights it packs."""
    layer = AttentionGRU(8, 8, 8, BahdanauAttention(8, 8, 8))
    for dtype, x, wanted in (
        (torch.bfloat16, X, ("one operator on cpu", "")),
        (torch.bfloat16, X[:, :1], ("step by step", "autocast is on")),
        (torch.float16, X, ("step by step", "autocast is on")),
    ):
        with torch.autocast("cpu", dtype):
            got = choices(layer, x, layer.prepare(X, LENGTHS))["recurrent layer"]
        assert got == wanted


@pytest.mark.parametrize(
    ("rnn", "options", "reason"),
    [
        (nn.LSTM(8, 8, batch_first=True), {}, "oneDNN is as fast"),
        (nn.GRU(8, 8), {}, "it is no plain nn.GRU, nn.LSTM"),
        (nn.GRU(8, 8, batch_first=True), {"backend": "reference"}, "reference, as requested"),
    ],
)
def test_a_layer_of_pytorchs(rnn, options, reason):
    [(ran, got)] = choices(run_rnn, rnn, X, **options).values()
    assert ran == "PyTorch" and got.startswith(reason)


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (X.half(), torch.ones(8, 8).half(), "the operator takes dense float32 or float64"),
        (X, torch.ones(8, 8), "PyTorch is as fast for few rows"),
        (
            torch.ones(4096, 1024, requires_grad=True),
            torch.ones(8, 1024),
            "the operator saves both input and weight",
        ),
    ],
)
def test_a_linear_layer(x, weight, reason):
    ran, got = choices(linear, x, weight)["linear"]
    assert ran == "PyTorch" and got.startswith(reason)


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        ({}, lambda model: model.eval(), ""),
        ({}, lambda model: model.train(), "dropout is on: call eval() first"),
        ({"attention": "coverage"}, lambda model: model.eval(), ""),
        ({"pointer_generator": True}, lambda model: model.eval(), ""),
        ({"decoder_layers": 2}, lambda model: model.eval(), ""),
    ],
)
def test_a_search(config, change, reason):
    model = change(build(Config(20, embed_dim=8, hidden_dim=8, dropout=0.5, **config)))
    ran, got = choices(greedy_search, model, WORDS, LENGTHS)["greedy search"]
    assert (ran, got) == ("step by step" if reason else "one operator on cpu", reason)
    assert choices(beam_search, model, WORDS, LENGTHS, 2)["beam search"] == (ran, reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"coverage_penalty": 0.5, "need_weights": True}, ""),
        ({"beam": 65}, "the operator has at most 64 hypotheses"),
        ({"min_length": 2, "prefix": [[4], [5]], "no_repeat_ngram": 2}, ""),
        ({"word_mask": torch.ones(20).bool(), "forbidden": [0]}, ""),
        ({"forbidden": [1]}, "a hypothesis may have the padding word, 0"),
    ],
)
def test_options_of_a_beam(options, reason):
    model = build(Config(20, embed_dim=8, hidden_dim=8)).eval()
    search = partial(beam_search, model, WORDS, LENGTHS, **options)
    ran = "step by step" if reason else "one operator on cpu"
    assert choices(search)["beam search"] == (ran, reason)


def test_a_replaced_module():
    module = reference_projects.BahdanauAttention(8)
    attnfast.replace(module)
    query = X[:, :1]
    name = "BahdanauAttention.forward"
    assert choices(module, query, X)[name] == ("attnfast", "")
    assert choices(torch.func.vmap(module), X[:, None, :1], X[:, None])[name] == (
        "its own code", "torch.func, forward mode or a hook on all modules is active",
    )  # fmt: skip
    handle = module.Va.register_forward_hook(lambda *_: None)
    ran, reason = choices(module, query, X)[name]
    assert ran == "its own code" and reason.startswith("an inner layer has hooks")
    handle.remove()
    assert choices(module, query.squeeze(1).unsqueeze(1), X)[name][0] == "attnfast"


def test_a_replaced_decoder():
    decoder = reference_projects.AttnDecoderRNN(8, 9)
    attnfast.replace(decoder)
    source, hidden = torch.randn(2, 4, 8), torch.randn(1, 2, 8)
    ran, reason = choices(decoder, source, hidden)["AttnDecoderRNN.forward"]
    assert (ran, reason) == ("its own code", "there is no target, and dropout is on")
    ran, _ = choices(decoder.eval(), source, hidden)["AttnDecoderRNN.forward"]
    assert ran == "attnfast"
    target = torch.ones(2, reference_projects.MAX_LENGTH, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        ran, reason = choices(decoder, source, hidden, target)["AttnDecoderRNN.forward"]
    assert ran == "its own code" and reason == "autocast is on"
    assert choices(decoder, source, hidden, target)["AttnDecoderRNN.forward"] == ("attnfast", "")


def test_the_log_has_each_decision_once():
    code = (
        "import torch, attnfast\n"
        "x = torch.ones(1, 2, 3)\n"
        "for _ in range(2): attnfast.dot_attention(x, x, x)\n"
        "attnfast.dot_attention(x, x, x, backend='reference')"
    )
    for wanted, count in (("dispatch", 2), ("x,dispatch", 2), ("other", 0)):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "ATTNFAST_LOG": wanted},
        )  # fmt: skip
        assert done.stderr.count("attnfast: attention: ") == count and not done.stdout
