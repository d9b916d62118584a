"""Whole decoders, served in one call for all steps of a target."""

from __future__ import annotations

import argparse
import copy
import pickle
import random
from types import FunctionType
from unittest import mock

import pytest
import torch
from integrations import reference_projects
from integrations.common import compare, operators, real
from integrations.reference_projects import (
    MAX_LENGTH,
    AttnDecoderRNN,
    Seq2SeqAttentionDecoder,
    SOS_token,
)
from torch import nn

import attnfast
from attnfast.integrations import fused_decoders
from attnfast.integrations.adapter import ProbeInputs
from attnfast.nn import _linear

PIPELINE = ("ahocorasick", "configargparse", "fasttext", "pyonmttok", "rapidfuzz", "spacy", "yaml")
D2L = ("IPython", "matplotlib", "matplotlib_inline", "pandas", "PIL", "requests", "scipy",
       "torchvision")  # fmt: skip
WORDS = 11
pytestmark = pytest.mark.skipif(
    fused_decoders.select_layer_backend(None, None, torch.empty(0))[0] is None,
    reason="no operator for whole targets",
)


# ---- the decoders, and how they are called -------------------------------------------------------


def tutorial(dropout=0.1):
    return AttnDecoderRNN(8, WORDS, dropout)


def translate(decoder, draw):
    for B, Tk in ((3, 7), (1, 4)):
        inputs = draw(B, Tk, 8), draw(1, B, 8)
        yield decoder(*inputs, draw.words(WORDS, B, MAX_LENGTH))
        yield decoder(*inputs, target_tensor=draw.words(WORDS, B, MAX_LENGTH + 3))
        yield decoder(*inputs)


def d2l(layers=1, dropout=0.0):
    attention = real("d2l.torch", *D2L).AdditiveAttention(8, dropout)
    decoder = Seq2SeqAttentionDecoder(attention, WORDS, 5, 8, layers)
    with torch.no_grad():
        read(decoder, ProbeInputs(torch.float32, torch.device("cpu")))
    decoder._attention_weights = attention.attention_weights = None
    return decoder


def read(decoder, draw):
    results = []
    for lengths in ((7, 1, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        source, one = draw(Tk, B, 8), draw.numbers(*lengths)
        for seen in (one, one + 0.5, one + Tk, one[:, None], None):
            state = decoder.init_state((source, draw(decoder.rnn.num_layers, B, 8)), seen)
            for T in (5, 1, 2):
                out, state = decoder(draw.words(WORDS, B, T), state)
                results.append((out, list(state), list(decoder.attention_weights)))
    return results


def onmt(rnn="LSTM", kind="general", layers=1, dropout=0.0, **more):
    words = real("onmt.modules.embeddings", *PIPELINE).Embeddings(5, WORDS, word_padding_idx=1)
    decoder = real("onmt.decoders.decoder", *PIPELINE).InputFeedRNNDecoder(
        rnn, False, layers, 8, kind, embeddings=words, dropout=dropout, **more
    )
    for p in decoder.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    return decoder


def feed(decoder, draw):
    for lengths in ((7, 1, 4), (3, 3)):
        B, source = len(lengths), draw(len(lengths), max(lengths), 8)
        last = [draw(decoder.num_layers, B, 8) for _ in range(2)]
        counts = draw.numbers(*lengths)
        for seen in (counts, None, counts + 2, counts[:1] / 2):  # the project's mask takes all
            lstm = "LSTM" in type(decoder.rnn).__name__
            decoder.init_state(None, None, tuple(last) if lstm else last[0])
            for T in (5, 1, 2):
                yield decoder(draw.words(WORDS, B, T, 1), source, src_len=seen)
                yield dict(decoder.state)


KINDS = {
    "tutorial": (tutorial, translate),
    "d2l": (d2l, read),
    "OpenNMT": (onmt, feed),
}


def served(plain, left=""):
    """Return a copy that is replaced, its own code left for the reason given."""
    decoder = copy.deepcopy(plain)
    report = attnfast.replace(decoder)
    [found] = [x for x in report.found if x.path == ""]
    assert left in found.skip_reason and bool(found.skip_reason) == bool(left), report
    return decoder


# ---- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decoder(kind):
    """Results, attributes and gradients; dropout of words takes the same random numbers."""
    torch.manual_seed(0)
    make, use = KINDS[kind]
    compare(make(), use)
    assert operators(served(make()), use) == {"tutorial": 4, "d2l": 16, "OpenNMT": 16}[kind]


@pytest.mark.parametrize("kind", ["general", "dot"])
@pytest.mark.parametrize("rnn", ["LSTM", "GRU"])
def test_input_feeding(rnn, kind):
    torch.manual_seed(0)
    compare(onmt(rnn, kind), feed)


def test_dropout_of_weights_is_left_to_its_own_code():
    torch.manual_seed(0)
    plain = d2l(2, dropout=0.5)
    compare(plain, read)
    decoder = served(plain)
    assert operators(decoder.train(), read) == 0 and operators(decoder.eval(), read) > 0


@pytest.mark.parametrize("kind", ["d2l", "OpenNMT"])
def test_stacks(kind):
    """The query is the last layer's state."""
    torch.manual_seed(0)
    make, use = KINDS[kind]
    compare(make(layers=3), use)
    assert operators(served(make(layers=3)), use) == {"d2l": 16, "OpenNMT": 16}[kind]


@pytest.mark.parametrize(
    ("layers", "dropout"),
    [(3, 0.5), (2, 1.0), (2, (0.0, 0.4))],
)
def test_dropout_takes_the_same_random_numbers(layers, dropout):
    torch.manual_seed(0)
    between, of_output = dropout if isinstance(dropout, tuple) else (dropout, dropout)
    plain = onmt(layers=layers, dropout=between)
    plain.dropout.p = of_output
    compare(plain.train(), feed)
    assert operators(served(plain), feed) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_runs_its_own_code(kind):
    make, use = KINDS[kind]
    decoder = served(make())
    with torch.autocast("cpu", torch.bfloat16):
        assert operators(decoder, use) == 0


HOOKED = {
    "tutorial": ("embedding", "gru", "out", "dropout", "attention", "attention.Wa", "attention.Ua"),
    "d2l": ("rnn", "attention", "attention.W_q", "attention.W_k"),
    "OpenNMT": ("rnn", "rnn.layers.0", "dropout", "attn", "attn.linear_in", "attn.linear_out"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in HOOKED.items() for name in names]
)
def test_inner_hooks(kind, name):
    """Before, the decoder is left alone; afterwards its own code runs, and they are called."""
    make, use = KINDS[kind]
    plain = make()
    decoder, calls = served(plain), []
    decoder.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert operators(decoder, use) == 0 and calls
    plain.get_submodule(name).register_forward_hook(print)
    served(plain, left=f"its {name} has hooks")


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind):
    make, use = KINDS[kind]
    decoder = served(make())
    assert operators(copy.deepcopy(decoder), use) > 0
    if kind != "OpenNMT":
        assert operators(pickle.loads(pickle.dumps(decoder)), use) > 0
    report = attnfast.replace(decoder)
    assert "served already" in str(report) and not report.replaced


@pytest.mark.parametrize("kind", KINDS)
def test_undo(kind):
    make, use = KINDS[kind]
    decoder = make()
    report = attnfast.replace(decoder, strict=True)
    assert [x.path for x in report.replaced] in (["", "attention"], ["", "attn"])
    report.undo()
    assert operators(decoder, use) == 0 and type(decoder) is type(make())


def test_attention_that_keeps_weights_with_a_graph():
    decoder = d2l()
    decoder.attention(*torch.randn(3, 2, 4, 8), None)
    assert decoder.attention.attention_weights.requires_grad
    assert attnfast.replace(decoder).replaced[0].module is decoder


def test_a_source_is_projected_once():
    decoder, source, hidden = served(tutorial()), torch.randn(2, 4, 8), torch.randn(1, 2, 8)
    words = torch.zeros(2, MAX_LENGTH, dtype=torch.long)
    with mock.patch.object(_linear, "project", wraps=_linear.project) as project:
        for _ in range(3):
            decoder(source, hidden, words)
    assert [x.args[0] for x in project.call_args_list] == [decoder.attention.Ua]


# ---- decoders that are left alone, their attention served ----------------------------------------


def test_half_types_and_other_backends_are_left_alone():
    served(tutorial().half(), left="no operator runs whole targets in torch.float16 on cpu")


def test_attention_that_is_served_already():
    decoder = tutorial()
    attnfast.replace(decoder.attention)
    assert operators(served(decoder), translate) > 0


def test_other_layers_and_scores_are_left_alone():
    deep = tutorial()
    deep.gru = nn.GRU(16, 8, 2, batch_first=True)
    several = [
        (deep, "it has 2 layers"),
        (onmt(kind="mlp"), "its attentional vectors have no tanh"),
        (onmt(coverage_attn=True), "it has coverage"),
        (onmt(copy_attn=True), "it copies"),
        (onmt(copy_attn=True, reuse_copy_attn=True), "it copies"),
        (onmt(context_gate="both"), "it has a context gate"),
    ]
    for decoder, why in several:
        served(decoder, left=why)
        assert attnfast.replace(decoder, strict=True).replaced, "its attention is served"


def test_attention_that_is_left_alone():
    class Attention(reference_projects.BahdanauAttention):
        def forward(self, query, keys):
            return super().forward(query, keys)

    decoder = tutorial()
    decoder.attention.__class__ = Attention
    report = attnfast.replace(decoder)
    assert "its attention is left alone" in str(report) and not report.replaced


class Sampled(AttnDecoderRNN):
    """Feeds its own words now and then, which an example need not show."""

    __qualname__ = "AttnDecoderRNN"
    reads = MAX_LENGTH, SOS_token  # names that its file must have

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        forced = target_tensor if random.random() < 2 else None
        return AttnDecoderRNN.forward(self, encoder_outputs, encoder_hidden, forced)


class Heated(AttnDecoderRNN):
    __qualname__ = "AttnDecoderRNN"
    heat = 1.0

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        source = encoder_outputs * self.heat
        return AttnDecoderRNN.forward(self, source, encoder_hidden, target_tensor)


class Stepped(AttnDecoderRNN):
    def forward_step(self, input, hidden, encoder_outputs):
        return super().forward_step(input, hidden, encoder_outputs)


class Rectified(AttnDecoderRNN):
    """As in an older edition of the tutorial."""

    __qualname__ = "AttnDecoderRNN"

    def forward_step(self, input, hidden, encoder_outputs):
        embedded = self.dropout(self.embedding(input)).relu()
        context, weights = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
        output, hidden = self.gru(torch.cat([embedded, context], 2), hidden)
        return self.out(output), hidden, weights


class LastLayer(AttnDecoderRNN):
    """Begins with the last of the encoder's states, which are one in an example."""

    __qualname__ = "AttnDecoderRNN"

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        return AttnDecoderRNN.forward(self, encoder_outputs, encoder_hidden[-1:], target_tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_of_a_usual_size_are_served(kind):
    """Rounding grows from step to step, with larger parameters above all."""
    D = 256
    torch.manual_seed(0)
    if kind == "tutorial":
        decoder = AttnDecoderRNN(D, 1000, 0.1)
    elif kind == "d2l":
        attention = real("d2l.torch", *D2L).AdditiveAttention(D, 0.1)
        decoder = Seq2SeqAttentionDecoder(attention, 1000, D, D)
        with torch.no_grad():
            attention(torch.randn(1, 1, D), *[torch.randn(1, 2, D)] * 2, None)
        attention.attention_weights = None
    else:
        words = real("onmt.modules.embeddings", *PIPELINE).Embeddings(D, 1000, word_padding_idx=1)
        decoder = real("onmt.decoders.decoder", *PIPELINE).InputFeedRNNDecoder(
            "LSTM", False, 1, D, "general", embeddings=words
        )
    for p in decoder.parameters():
        nn.init.uniform_(p, -(D**-0.5), D**-0.5)
    served(decoder)


def test_states_of_another_shape_are_for_its_own_code():
    plain = LastLayer(8, WORDS, 0.0)
    decoder = served(plain)
    words = torch.arange(2 * MAX_LENGTH).view(2, -1) % WORDS
    source, hidden = torch.randn(2, 4, 8), torch.randn(2, 2, 8)
    torch.testing.assert_close(decoder(source, hidden, words), plain(source, hidden, words))


class Gradual(AttnDecoderRNN):
    """Cuts gradients, which an example need not show."""

    __qualname__ = "AttnDecoderRNN"
    reads = MAX_LENGTH, SOS_token

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        source = encoder_outputs if torch.is_grad_enabled() else encoder_outputs * 2
        return AttnDecoderRNN.forward(self, source, encoder_hidden, target_tensor)


OPTIONS = argparse.Namespace(heat=1.0)


class Configured(AttnDecoderRNN):
    """Reads the command's options, which may change."""

    __qualname__ = "AttnDecoderRNN"
    reads = MAX_LENGTH, SOS_token

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        source = encoder_outputs * OPTIONS.heat
        return AttnDecoderRNN.forward(self, source, encoder_hidden, target_tensor)


COPIES = {
    Configured: "its own code reads OPTIONS, which",
    Gradual: "its own code reads is_grad_enabled, which",
    Sampled: "its own code reads random, which",
    Heated: "its own code reads heat, which",
    Stepped: "its class Stepped has a forward_step of its own",
    Rectified: "results differ",
}


def test_a_file_without_the_names():
    class Forced(AttnDecoderRNN):
        __qualname__ = "AttnDecoderRNN"
        forward = FunctionType(AttnDecoderRNN.forward.__code__, {"torch": torch})

    served(Forced(8, WORDS), left="its file lacks MAX_LENGTH or SOS_token")


@pytest.mark.parametrize("cls", COPIES)
def test_copies_that_do_something_else_are_left_alone(cls):
    served(cls(8, WORDS), left=COPIES[cls])
