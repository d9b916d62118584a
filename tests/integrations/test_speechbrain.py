"""SpeechBrain: its attention, its recurrent decoder and its searches."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import (
    compare,
    operators,
    preparations,
    real,
    same_after_training,
    same_training_step,
    serve,
)

import attnfast

UNUSED = ("hyperpyyaml", "joblib", "ruamel", "scipy", "sentencepiece", "torchaudio", "yaml")
speechbrain = real("speechbrain.nnet.attention", *UNUSED)
RNN = real("speechbrain.nnet.RNN", *UNUSED)
linear = real("speechbrain.nnet.linear", *UNUSED)
decoders = real("speechbrain.decoders.seq2seq", *UNUSED)

BOTH = (torch.float64, torch.float32)
KINDS = {
    "content": (speechbrain.ContentBasedAttention, (), BOTH),
    # the project's first weights are float32 with whole lengths
    "location": (speechbrain.LocationAwareAttention, (3, 2), (torch.float32,)),
    "keyvalue": (speechbrain.KeyValueAttention, (), BOTH),
}


def use(attention, draw, whole=True, steps=3):
    for lengths in ((7, 1, 4), (3, 3), (5,)):
        attention.reset()
        states, ends = draw(len(lengths), max(lengths), 6), draw.numbers(*lengths)
        ends = ends if whole else ends.to(draw.dtype) - 0.3
        for _ in range(steps):
            yield attention(states, ends, draw(len(lengths), 5))


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind):
    cls, more, dtypes = KINDS[kind]
    compare(cls(6, 5, 7, 4, *more), use, dtypes)
    compare(cls(6, 5, 7, 4, *more), lambda m, draw: use(m, draw, whole=False), BOTH)
    if kind != "keyvalue":
        compare(cls(6, 5, 7, 4, *more, scaling=1.7), use, dtypes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_prepared_once(kind):
    cls, more, _ = KINDS[kind]  # three sources; filters besides
    assert preparations(cls(6, 5, 7, 4, *more), use) == (6 if kind == "location" else 3)


def test_a_search_may_write_the_last_weights():
    def search(attention, draw):
        for n, _ in enumerate(use(attention, draw, steps=4)):
            yield attention.prev_attn
            attention.prev_attn = attention.prev_attn.roll(n, 0)

    compare(speechbrain.LocationAwareAttention(6, 5, 7, 4, 3, 2), search, (torch.float32,))


class Model(torch.nn.Module):
    """SpeechBrain's recurrent decoder on an encoder of its own."""

    def __init__(self, kind, rnn):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.LSTM(4, 6, batch_first=True)
        self.words = torch.nn.Embedding(9, 3)
        self.decoder = RNN.AttentionalRNNDecoder(
            rnn, kind, 5, 4, 2, enc_dim=6, input_size=3, channels=3, kernel_size=2, scaling=1.3
        )
        self.out = linear.Linear(n_neurons=9, input_size=5)

    def forward(self, source, lengths, words):
        out, weights = self.decoder(self.words(words), self.encoder(source)[0], lengths)
        return self.out(out), weights

    def search(self, source, lengths, beam):
        parts = {"embedding": self.words, "decoder": self.decoder, "linear": self.out}
        ends = {"bos_index": 0, "eos_index": 1, "min_decode_ratio": 0, "max_decode_ratio": 1}
        if beam == 1:
            searcher = decoders.S2SRNNGreedySearcher(**parts, **ends)
        else:
            searcher = decoders.S2SRNNBeamSearcher(**parts, **ends, beam_size=beam)
        with torch.no_grad():
            return searcher(self.encoder(source)[0], lengths)[0]


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_decoders(kind, rnn):
    """Steps of training, and between them greedy search and beams."""
    plain = Model(kind, rnn)
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    assert [x.path for x in report.replaced] == ["decoder", "decoder.attn"]
    source, lengths = torch.randn(3, 8, 4), torch.tensor([1.0, 0.3, 0.75])
    words = torch.randint(2, 9, (3, 5))
    for beam in (1, 3):
        same_training_step(plain, served, lambda m: m(source, lengths, words))
        found = [m.search(source, lengths, beam) for m in (plain, served)]
        assert found[0] == found[1] and any(found[0])


# ---- all steps of a target in one operator -------------------------------------------------------


def decoder(rnn="gru", kind="content", layers=1, dropout=0.0, nonlinearity="tanh", **more):
    torch.manual_seed(0)
    return RNN.AttentionalRNNDecoder(
        rnn, kind, 5, 4, layers, enc_dim=6, input_size=3, nonlinearity=nonlinearity, channels=3,
        kernel_size=2, scaling=1.3, dropout=dropout, **more,
    )  # fmt: skip


def read(module, draw):
    """Targets of several lengths for sources of relative lengths, which need not be whole."""
    for lengths in ((7, 1, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        ends = draw.numbers(*lengths).to(draw.dtype) / Tk
        for shift in (0, 0.04):
            for T in (5, 1, 2):
                yield module(draw(B, T, 3), draw(B, Tk, 6), ends - shift)


CELLS = [("gru", 1), ("lstm", 2), ("rnn", 3)]


@pytest.mark.parametrize(("rnn", "layers"), CELLS)
@pytest.mark.parametrize("kind", ["content", "keyvalue"])
def test_decoder(kind, rnn, layers):
    plain = decoder(rnn, kind, layers)
    compare(plain, read)
    serve(plain)
    assert operators(plain, read) == 8, "all targets but those of one word"


@pytest.mark.parametrize("bias", [False, True])
def test_decoder_trains(bias):
    same_after_training(decoder("lstm", "content", 2, bias=bias), read)


@pytest.mark.parametrize(("rnn", "layers"), CELLS)
def test_decoder_with_location_features(rnn, layers):
    """Its own code cuts the gradients of the weights before."""
    plain = decoder(rnn, "location", layers)
    compare(plain, read, (torch.float32,))
    serve(plain)
    assert operators(plain, read) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_decoder_with_dropout(kind):
    """Inputs, fed contexts and the layers' outputs are dropped by the same random numbers."""
    plain = decoder("lstm", kind, 2, dropout=0.3)
    compare(plain, read, KINDS[kind][2])
    serve(plain)
    assert operators(plain.train(), read) == 8


def test_decoders_that_are_left_alone():
    report = attnfast.replace(decoder("rnn", nonlinearity="relu"))
    assert "its cells have a relu" in str(report)
    assert [x.path for x in report.replaced] == ["attn"]


@pytest.mark.parametrize("name", ["rnn", "rnn.rnn_cells.0", "drop", "proj", "attn", "attn.mlp_out"])
def test_hooks_in_a_decoder(name):
    served, calls = decoder(), []
    attnfast.replace(served)
    served.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert operators(served, read) == 0 and calls
