"""Tacotron 2: torchaudio's real attention and model, NVIDIA's by a double."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import (
    alone,
    compare,
    operators,
    preparations,
    same_after_training,
    same_training_step,
    serve,
)
from integrations.reference_projects import (
    MellotronAttention,
    Tacotron2Attention,
    Tacotron2Decoder,
)

import attnfast

torchaudio = alone("torchaudio.models.tacotron2")
CLASSES = [torchaudio._Attention, Tacotron2Attention, MellotronAttention]


def decode(attention, draw, masked=True, steps=3):
    for lengths in ((6, 1, 4), (3, 5), (7,)):
        B, Tk = len(lengths), max(lengths)
        memory = draw(B, Tk, 6)
        processed = attention.memory_layer(memory)
        mask = ~draw.seen(lengths, Tk) if masked else None
        weights, total = torch.zeros(2, B, Tk, dtype=draw.dtype)
        for _ in range(steps):
            history = torch.stack([weights, total], 1)
            context, weights = attention(draw(B, 5), memory, processed, history, mask)
            total = total + weights
            yield context, weights


@pytest.mark.parametrize("cls", CLASSES)
def test_attention(cls):
    for width in (1, 5, 31):
        compare(cls(5, 6, 7, 3, width), decode)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_source_is_prepared_once(cls):
    assert preparations(cls(5, 6, 7, 3, 5), decode) == 6  # three, each with its filters


def test_without_a_mask():
    """As NVIDIA's decoder calls it at inference."""
    compare(Tacotron2Attention(5, 6, 7, 3, 5), lambda m, draw: decode(m, draw, masked=False))
    attention = Tacotron2Attention(5, 6, 7, 3, 5)
    attention.score_mask_value = torch.finfo(torch.float16).min
    compare(attention, decode)


def test_weights_that_are_given():
    """As mellotron's decoder copies those of another voice; its own code runs these calls."""

    def use(attention, draw):
        memory, history = draw(3, 6, 6), draw(3, 2, 6)
        processed, weights = attention.memory_layer(memory), draw(3, 6)
        for given in (None, weights, weights, None):
            yield attention(draw(3, 5), memory, processed, history, None, given)
        yield attention(draw(3, 5), memory, processed, history, None, attention_weights=weights)

    compare(MellotronAttention(5, 6, 7, 3, 5), use)


def test_other_convolutions_are_left_alone():
    attention = torchaudio._Attention(5, 6, 7, 3, 5)
    attention.location_layer.location_conv.dilation = (2,)
    attention.location_layer.location_conv.padding = (4,)
    assert "skipped: results differ" in str(attnfast.replace(attention))


def model(dropout=0.1):
    torch.manual_seed(0)
    return torchaudio.Tacotron2(
        n_mels=4, n_symbol=9, symbol_embedding_dim=6, encoder_embedding_dim=6,
        encoder_kernel_size=3, encoder_n_convolution=1, decoder_rnn_dim=5, decoder_max_step=12,
        prenet_dim=4, attention_rnn_dim=5, attention_hidden_dim=7, attention_location_n_filter=3,
        attention_location_kernel_size=5, postnet_n_convolution=2, postnet_kernel_size=3,
        postnet_embedding_dim=4, attention_dropout=dropout, decoder_dropout=dropout,
    ).double()  # fmt: skip


def test_the_whole_model():
    plain = model()
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    assert [x.path for x in report.replaced] == ["decoder", "decoder.attention_layer"]
    words, lengths = torch.randint(1, 9, (3, 7)), torch.tensor([7, 4, 2])
    speech, steps = torch.randn(3, 4, 10).double(), torch.tensor([10, 8, 3])
    same_training_step(plain, served, lambda m: m(words, lengths, speech, steps))
    results = []
    for m in (plain.eval(), served.eval()):
        torch.manual_seed(2)
        with torch.no_grad():
            results.append(m.infer(words, lengths))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# ---- all steps of a target in one operator -------------------------------------------------------


def nvidia(dropout=0.0):
    torch.manual_seed(0)
    return Tacotron2Decoder(4, 6, (5, 3), 4, Tacotron2Attention(5, 6, 7, 3, 5), dropout)


def speak(decoder, draw):
    for lengths in ((6, 1, 4), (3, 5), (7,)):
        B, Tk = len(lengths), max(lengths)
        for T in (5, 1, 2):
            yield decoder(draw(B, Tk, 6), draw(B, 4, T), draw.numbers(*lengths))


DECODERS = {"NVIDIA": nvidia, "torchaudio": lambda dropout=0.0: model(dropout).decoder.float()}


@pytest.mark.parametrize("project", DECODERS)
def test_decoder(project):
    """The prenet drops features with the same random numbers, in evaluation too."""
    plain = DECODERS[project]()
    compare(plain, speak)
    serve(plain)
    assert operators(plain, speak) == 6, "all targets but those of one frame"


@pytest.mark.parametrize("project", DECODERS)
def test_decoder_trains(project):
    same_after_training(DECODERS[project](), speak)


@pytest.mark.parametrize("project", DECODERS)
def test_decoder_with_dropout(project):
    """The states of both layers are dropped by the same random numbers."""
    plain = DECODERS[project](0.3)
    compare(plain, speak)
    serve(plain)
    assert operators(plain.train(), speak) == 6


@pytest.mark.parametrize("name", ["attention_rnn", "attention_layer.location_layer", "gate_layer"])
def test_hooks_in_a_decoder(name):
    served, calls = nvidia(), []
    attnfast.replace(served)
    served.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert operators(served, speak) == 0 and calls
