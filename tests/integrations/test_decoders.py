"""Whole decoders, served in one call for all steps of a target."""

from __future__ import annotations

import argparse
import copy
import pickle
import random
from functools import partial
from importlib import import_module
from types import FunctionType, SimpleNamespace
from unittest import mock

import pytest
import torch
from integrations import reference_projects
from integrations.common import compare, operators, real, serve
from integrations.reference_projects import (
    MAX_LENGTH,
    AttnDecoderRNN,
    RecognitionHead,
    Seq2SeqAttentionDecoder,
    SOS_token,
    bentrevett_model,
)
from torch import nn

import attnfast
from attnfast.integrations import fused_decoders
from attnfast.integrations.adapter import ProbeInputs
from attnfast.integrations.probe import tensors
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


def tutorial(dropout=0.1, size=8, words=WORDS):
    return AttnDecoderRNN(size, words, dropout)


def translate(decoder, draw):
    for B, Tk in ((3, 7), (1, 4)):
        inputs = draw(B, Tk, 8), draw(1, B, 8)
        yield decoder(*inputs, draw.words(WORDS, B, MAX_LENGTH))
        yield decoder(*inputs, target_tensor=draw.words(WORDS, B, MAX_LENGTH + 3))
        yield decoder(*inputs)


def d2l(layers=1, dropout=0.0, size=8, words=WORDS):
    attention = real("d2l.torch", *D2L).AdditiveAttention(size, dropout)
    decoder = Seq2SeqAttentionDecoder(attention, words, 5, size, layers)
    with torch.no_grad():
        attention(torch.randn(1, 1, size), *[torch.randn(1, 2, size)] * 2, None)
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


def initialised(decoder):
    """Give parameters that the project leaves as they were in memory."""
    for p in decoder.parameters():
        nn.init.uniform_(p, -(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5)
    return decoder


def onmt(rnn="LSTM", kind="general", layers=1, dropout=0.0, size=8, words=WORDS, **more):
    words = real("onmt.modules.embeddings", *PIPELINE).Embeddings(5, words, word_padding_idx=1)
    decoder = real("onmt.decoders.decoder", *PIPELINE).InputFeedRNNDecoder(
        rnn, False, layers, size, kind, embeddings=words, dropout=dropout, **more
    )
    return initialised(decoder)


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


def eole(rnn="LSTM", kind="general", layers=1, dropout=0.0, size=8, words=WORDS, coverage=False):
    config = SimpleNamespace(
        global_attention=kind, global_attention_function="softmax", bidirectional_encoder=False,
        layers=layers, rnn_type=rnn, context_gate=None, coverage_attn=coverage, hidden_size=size,
        tgt_word_vec_size=5,
    )  # fmt: skip
    decoder = real("eole.decoders.rnn_decoder", "yaml").InputFeedRNNDecoder
    return decoder(config, SimpleNamespace(dropout=[dropout]))


def feed_embedded(decoder, draw):
    for lengths in ((7, 1, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        source, last = draw(B, Tk, 8), [draw(decoder.num_layers, B, 8) for _ in range(2)]
        for mask in (~draw.seen(lengths, Tk).unsqueeze(1), None):
            lstm = "LSTM" in type(decoder.rnn).__name__
            decoder.init_state(enc_final_hs=tuple(last) if lstm else last[0])
            for T in (5, 1, 2):
                yield decoder(draw(B, T, 5), source, src_pad_mask=mask)
                yield dict(decoder.state)


def joeynmt(**more):
    return import_module("integrations.test_joeynmt").make_decoder(**more)


def unroll(decoder, draw):
    yield from import_module("integrations.test_joeynmt").unroll(decoder, draw)


def clovaai(size=8, words=7):
    return RecognitionHead(6, size, words)


def recognise(head, draw):
    """Read texts of 5 characters, which may be longer, and without a text."""
    for B, Tk in ((3, 7), (1, 4)):
        source = draw(B, Tk, 6)
        yield head(source, draw.words(7, B, 5), batch_max_length=4)
        yield head(source, draw.words(7, B, 8), True, 4)
        yield head(source, draw.words(7, B, 5), False, 4)


def yoyodyne(kind="SoftAttention", cell="LSTM", layers=2, dropout=0.3, size=4, words=12):
    return import_module("integrations.test_yoyodyne").model(
        kind, cell, layers=layers, dropout=dropout, size=size, words=words
    )


def force(model, draw):
    yield from import_module("integrations.test_yoyodyne").force(model, draw)


def bentrevett(edition="", masked=True, dropout=0.5, size=4, words=WORDS):
    return bentrevett_model(edition, masked, words, D=size, dropout=dropout)


def sample(model, draw):
    """Feed the target, the model's own words, and both; an encoder has to be the model's."""
    random.seed(0)
    for lengths in ((7, 4, 1), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        src = draw.words(WORDS, B, Tk).clamp(min=2).masked_fill(~draw.seen(lengths, Tk), 1).T
        sizes = [draw.numbers(*lengths)] if hasattr(model, "create_mask") else []
        for ratio in (1.0, 0.5, 0.8, 0):
            for T in (9, 2):
                yield model(src, *sizes, draw.words(WORDS, B, T).T, ratio)
        yield random.random()


#: How a decoder is made and called, and how many operators its calls run.
KINDS = {
    "tutorial": (tutorial, translate, 4),
    "d2l": (d2l, read, 16),
    "OpenNMT": (onmt, feed, 16),
    "eole": (eole, feed_embedded, 8),
    "joeynmt": (joeynmt, unroll, 6),
    "clovaai": (clovaai, recognise, 6),
    "yoyodyne": (yoyodyne, force, 6),
    "bentrevett": (bentrevett, sample, 35),
}
FLOAT = {"clovaai", "bentrevett"}  # whose code makes float32


def dtypes(kind):
    return (torch.float32,) if kind in FLOAT else (torch.float64, torch.float32)


def served(plain, left=None):
    """Return a copy that is replaced; with ``left`` it is compared, and skipped for a reason.

    The other tests serve decoders that are compared in test_decoder.
    """
    decoder = copy.deepcopy(plain)
    report = serve(decoder) if left is None else attnfast.replace(decoder)
    left = left or ""
    [found] = [x for x in report.found if x.path == ""]
    assert left in found.skip_reason and bool(found.skip_reason) == bool(left), report
    return decoder


# ---- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decoder(kind):
    """Results, attributes and gradients; dropout of words takes the same random numbers."""
    torch.manual_seed(0)
    make, use, calls = KINDS[kind]
    compare(make(), use, dtypes(kind))
    assert operators(served(make()), use) == calls


@pytest.mark.parametrize("kind", KINDS)
def test_several_steps_of_training(kind):
    torch.manual_seed(0)
    make, use, _ = KINDS[kind]
    plain = make()
    decoders = [plain, served(plain)]
    for decoder in decoders:
        torch.manual_seed(0)
        optimiser = torch.optim.SGD(decoder.train().parameters(), 0.1)
        for _ in range(3):
            optimiser.zero_grad()
            results = tensors(list(use(decoder, ProbeInputs(torch.float32, torch.device("cpu")))))
            sum(x.sigmoid().mean() for x in results if x.requires_grad).backward()
            optimiser.step()
    moved = [list(x.parameters()) for x in (*decoders, make())]
    torch.testing.assert_close(*moved[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rnn", "kind"), [("LSTM", "dot"), ("GRU", "general"), ("LSTM", "mlp")])
def test_input_feeding(rnn, kind):
    torch.manual_seed(0)
    compare(onmt(rnn, kind), feed)
    compare(eole(rnn, kind), feed_embedded)
    assert operators(served(eole(rnn, kind)), feed_embedded) == 8


@pytest.mark.parametrize(
    "more", [{"copy_attn": True}, {"copy_attn": True, "reuse_copy_attn": True}]
)
def test_copying(more):
    torch.manual_seed(0)
    compare(onmt(**more), feed)
    assert operators(served(onmt(**more)), feed) == 16


@pytest.mark.parametrize(("edition", "masked"), [("2018", False), ("2024", True)])
def test_bentrevett(edition, masked):
    torch.manual_seed(0)
    compare(bentrevett(edition, masked), sample, dtypes("bentrevett"))


@pytest.mark.parametrize("kind", ["SoftAttention", "PointerGenerator"])
@pytest.mark.parametrize(("cell", "layers", "dropout"), [("GRU", 1, 0.0), ("LSTM", 3, 0.3)])
def test_yoyodyne(kind, cell, layers, dropout):
    """Dropout of symbols, between layers and of states takes the same random numbers."""
    compare(yoyodyne(kind, cell, layers, dropout), force)
    own = 2 * (kind == "PointerGenerator" and not dropout)  # others end with their first symbol
    assert operators(served(yoyodyne(kind, cell, layers, dropout)), force) == 6 + own


def test_dropout_of_weights_is_left_to_its_own_code():
    torch.manual_seed(0)
    plain = d2l(2, dropout=0.5)
    compare(plain, read)
    decoder = served(plain)
    assert operators(decoder.train(), read) == 0 and operators(decoder.eval(), read) > 0


@pytest.mark.parametrize("kind", ["d2l", "OpenNMT", "eole"])
def test_stacks(kind):
    """The query is the last layer's state."""
    torch.manual_seed(0)
    make, use, calls = KINDS[kind]
    compare(make(layers=3), use)
    assert operators(served(make(layers=3)), use) == calls


@pytest.mark.parametrize(
    ("layers", "dropout"),
    [(2, 1.0), (3, (0.5, 0.4))],
)
def test_dropout_takes_the_same_random_numbers(layers, dropout):
    torch.manual_seed(0)
    between, of_output = dropout if isinstance(dropout, tuple) else (dropout, dropout)
    plain = onmt(layers=layers, dropout=between)
    plain.dropout.p = of_output
    compare(plain.train(), feed)
    assert operators(served(plain), feed) == 16
    plain = eole(layers=layers, dropout=between)
    plain.dropout.p = of_output
    compare(plain, feed_embedded)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_runs_its_own_code(kind):
    make, use, _ = KINDS[kind]
    decoder = served(make())
    with torch.autocast("cpu", torch.bfloat16):
        assert operators(decoder, use) == 0


HOOKED = {
    "tutorial": ("embedding", "gru", "out", "dropout", "attention", "attention.Wa", "attention.Ua"),
    "d2l": ("rnn", "attention", "attention.W_q", "attention.W_k"),
    "OpenNMT": ("rnn", "rnn.layers.0", "dropout", "attn", "attn.linear_in", "attn.linear_out"),
    "eole": ("rnn", "rnn.layers.0", "dropout", "attn", "attn.linear_in", "attn.linear_out"),
    "joeynmt": (
        *("rnn", "emb_dropout", "hidden_dropout", "att_vector_layer"),
        *("attention", "attention.key_layer", "attention.query_layer", "attention.energy_layer"),
    ),
    "clovaai": ("attention_cell", *(f"attention_cell.{x}" for x in ("i2h", "h2h", "score", "rnn"))),
    "yoyodyne": (
        *("embeddings", "decoder", "decoder.module", "decoder.dropout_layer"),
        *("decoder.attention", "decoder.attention.M", "decoder.attention.V"),
    ),
    "bentrevett": (
        *("decoder", "decoder.embedding", "decoder.rnn", "decoder.dropout"),
        *("decoder.attention", "decoder.attention.attn"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in HOOKED.items() for name in names]
)
def test_inner_hooks(kind, name):
    """Before, the decoder is skipped; afterwards its own code runs, and they are called."""
    make, use, _ = KINDS[kind]
    plain = make()
    decoder, calls = served(plain), []
    decoder.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert operators(decoder, use) == 0 and calls
    plain.get_submodule(name).register_forward_hook(print)
    served(plain, left=f"its {name} has hooks")


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind):
    make, use, _ = KINDS[kind]
    decoder = served(make())
    assert operators(copy.deepcopy(decoder), use) > 0
    if kind not in ("OpenNMT", "clovaai", "bentrevett"):  # found by another name
        assert operators(pickle.loads(pickle.dumps(decoder)), use) > 0
    report = attnfast.replace(decoder)
    assert "served already" in str(report) and not report.replaced


@pytest.mark.parametrize("kind", KINDS)
def test_undo(kind):
    make, use, _ = KINDS[kind]
    decoder = make()
    report = attnfast.replace(decoder, strict=True)
    assert len(report.replaced) == 2 and report.replaced[0].path == ""
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


# ---- decoders that are skipped, their attention served ----------------------------------------


def test_half_types_and_other_backends_are_left_alone():
    served(tutorial().half(), left="no operator runs whole targets in torch.float16 on cpu")


def test_attention_that_is_served_already():
    decoder = tutorial()
    attnfast.replace(decoder.attention)
    assert operators(served(decoder, left=""), translate) > 0


def test_another_layer_is_left_alone():
    deep = tutorial()
    deep.gru = nn.GRU(16, 8, 2, batch_first=True)
    served(deep, left="it has 2 layers")
    assert attnfast.replace(deep, strict=True).replaced, "its attention is served"


@pytest.mark.parametrize(
    ("make", "use", "why"),
    [
        (partial(onmt, coverage_attn=True), feed, "it has coverage"),
        (partial(onmt, "GRU", context_gate="both"), feed, "it has a context gate"),
        (partial(eole, coverage=True), feed_embedded, "it has coverage"),
    ],
)
def test_loops_that_no_operator_runs(make, use, why):
    """The weights' gradients are computed at once, as attnfast.explain() says."""
    torch.manual_seed(0)
    plain = make()
    decoder = copy.deepcopy(plain)
    [whole] = [x for x in attnfast.replace(decoder, strict=True).replaced if not x.path]
    assert why in str(whole) and whole.adapter.name.endswith("with its own loop")
    compare(plain, use, (torch.float64,))
    draw = ProbeInputs(torch.float64, torch.device("cpu"))
    explained = attnfast.explain(lambda: list(use(decoder.double(), draw)))
    assert "weight gradients: one product each" in str(explained)


def test_attention_that_is_left_alone():
    class Attention(reference_projects.BahdanauAttention):
        def forward(self, query, keys):
            return super().forward(query, keys)

    decoder = tutorial()
    decoder.attention.__class__ = Attention
    report = attnfast.replace(decoder)
    assert "its attention is skipped" in str(report) and not report.replaced


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
    torch.manual_seed(0)
    served(initialised(KINDS[kind][0](size=256, words=1000)), left="")


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


class HeatedStep(reference_projects.TranslationStep):
    __qualname__ = "Decoder"
    heat = 1.0

    def forward(self, input, hidden, encoder_outputs, *mask):
        return super().forward(input, hidden * self.heat, encoder_outputs, *mask)


class RectifiedStep(reference_projects.TranslationStep):
    __qualname__ = "Decoder"

    def forward(self, input, hidden, encoder_outputs, *mask):
        return super().forward(input, hidden.relu(), encoder_outputs, *mask)


@pytest.mark.parametrize(
    ("cls", "why"), [(HeatedStep, "its own code reads heat, which"), (RectifiedStep, "differ")]
)
def test_a_model_whose_decoder_does_something_else_is_left_alone(cls, why):
    model = bentrevett()
    model.decoder.__class__ = cls
    served(model, left=why)


def test_a_model_that_draws_other_random_numbers_is_left_alone():
    class Model(reference_projects.PackedModel):
        __qualname__ = "Seq2Seq"

        def forward(self, src, src_len, trg, teacher_forcing_ratio=0.5):
            ratio = float(torch.rand(()) < teacher_forcing_ratio)
            return super().forward(src, src_len, trg, ratio)

    model = bentrevett()
    model.__class__ = Model
    served(model, left="its own code reads rand, which")


def test_a_comparison_draws_none_of_the_callers_random_numbers():
    model, state = bentrevett(), random.getstate()
    served(model, left="")
    assert random.getstate() == state


def test_a_file_without_the_names():
    class Forced(AttnDecoderRNN):
        __qualname__ = "AttnDecoderRNN"
        forward = FunctionType(AttnDecoderRNN.forward.__code__, {"torch": torch})

    served(Forced(8, WORDS), left="its file lacks MAX_LENGTH or SOS_token")


@pytest.mark.parametrize("cls", COPIES)
def test_copies_that_do_something_else_are_left_alone(cls):
    served(cls(8, WORDS), left=COPIES[cls])
