"""Coqui TTS: the attention of its Tacotrons, and Tacotron 2's decoder whole."""

from __future__ import annotations

import copy
from itertools import product

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

import attnfast

coqui = alone("TTS.tts.layers.tacotron.attentions", "scipy")
tacotron2 = alone("TTS.tts.layers.tacotron.tacotron2", "scipy")
SINGLE = (torch.float32,)  # the project's own first weights are float32


def make(location=True, windowing=False, norm="softmax", forward=False, agent=False, mask=False):
    # With other seeds two weights are nearly equal, and rounding decides which the mask follows.
    torch.manual_seed(2 * int(mask))
    shape = {"attention_location_n_filters": 3, "attention_location_kernel_size": 5}
    return coqui.OriginalAttention(
        5, 6, 7, location, windowing=windowing, norm=norm, forward_attn=forward, trans_agent=agent,
        forward_attn_mask=mask, **shape,
    )  # fmt: skip


def decode(attention, draw, steps=4):
    for lengths in ((7, 2, 4), (5, 5), (8,)):
        B, Tk = len(lengths), max(lengths)
        inputs, mask = draw(B, Tk, 6), draw.seen(lengths, Tk) if B > 1 else None
        attention.init_states(inputs)
        processed = attention.preprocess_inputs(inputs)
        for _ in range(steps):
            yield attention(draw(B, 5), inputs, processed, mask), attention.attention_weights


@pytest.mark.parametrize("norm", ["softmax", "sigmoid"])
@pytest.mark.parametrize("location", [False, True])
def test_attention(location, norm):
    compare(make(location, norm=norm), decode, SINGLE)


@pytest.mark.parametrize("location", [False, True])
def test_a_source_is_prepared_once(location):
    assert preparations(make(location), decode) == (6 if location else 3)  # filters besides


@pytest.mark.parametrize(("location", "agent", "mask"), list(product([False, True], repeat=3)))
def test_forward_attention(location, agent, mask):
    compare(make(location, forward=True, agent=agent, mask=mask), decode, SINGLE)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_mask_that_rounding_decides(seed):
    """Two weights of the first example are nearly equal: another one is compared."""
    attention = make(forward=True, agent=True, mask=True)
    torch.manual_seed(seed)
    for p in attention.parameters():
        p.data.copy_(torch.randn_like(p) * 0.3)
    assert attnfast.replace(attention).replaced


@pytest.mark.parametrize("location", [False, True])
def test_forward_attention_over_sigmoids(location):
    compare(make(location, norm="sigmoid", forward=True, agent=True), decode, SINGLE)


@pytest.mark.parametrize("forward", [False, True])
def test_windows_at_inference_are_its_own(forward):
    attention = make(windowing=True, forward=forward)
    compare(attention, decode, SINGLE, training=(True,))
    ours, own = copy.deepcopy(attention), copy.deepcopy(attention)
    assert attnfast.replace(ours).replaced
    for m in (ours, own):
        m.eval()
    inputs = torch.randn(1, 20, 6)
    with torch.no_grad():
        for m in (ours, own):
            torch.manual_seed(1)
            m.init_states(inputs)
            for _ in range(5):
                m(torch.randn(1, 5), inputs, m.preprocess_inputs(inputs), None)
    assert ours.win_idx == own.win_idx
    torch.testing.assert_close(ours.attention_weights, own.attention_weights)


def test_an_unknown_norm_is_refused():
    attention = make()
    attnfast.replace(attention)
    attention.norm = "entmax"  # afterwards
    inputs, query = torch.randn(2, 4, 6), torch.randn(2, 5)
    attention.init_states(inputs)
    with pytest.raises(ValueError, match="attention norm type"):  # of its own code
        attention(query, inputs, attention.preprocess_inputs(inputs), None)


class Model(torch.nn.Module):
    """Coqui's Tacotron 2 decoder, whose widths are fixed, on an encoder of its own."""

    def __init__(self, norm="softmax", separate_stopnet=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.LSTM(4, 6, batch_first=True)
        self.decoder = tacotron2.Decoder(
            in_channels=6, frame_channels=3, r=2, attn_type="original", attn_norm=norm,
            prenet_type="original", prenet_dropout=True, attn_K=1, max_decoder_steps=4,
            separate_stopnet=separate_stopnet, **options,
        )  # fmt: skip

    def forward(self, source, speech, mask):
        return self.decoder(self.encoder(source)[0], speech, mask)


def model(kind):
    forward = kind == "forward"
    return Model(
        location_attn=kind != "content", forward_attn=forward, trans_agent=forward,
        forward_attn_mask=forward, attn_win=kind == "windows", separate_stopnet=kind == "windows",
        norm="sigmoid" if kind == "sigmoid" else "softmax",
    )  # fmt: skip


# The others differ in their attention alone: see the tests above and test_the_decoder_trains.
def test_a_whole_decoder():
    """Dropout, of cell states too, takes the same random numbers."""
    plain = model("forward")
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    assert [x.path for x in report.replaced] == ["decoder", "decoder.attention"]
    assert report.replaced[0].adapter.name.endswith("with its own loop")
    source, mask = torch.randn(3, 7, 4), torch.arange(7) < torch.tensor([[7], [2], [5]])
    same_training_step(plain, served, lambda m: m(source, torch.randn(3, 6, 3), mask))
    spoken = []
    for m in (plain.eval(), served.eval()):
        torch.manual_seed(1)
        with torch.no_grad():
            spoken.append(m.decoder.inference(m.encoder(source[:1])[0]))
    torch.testing.assert_close(*spoken, rtol=1e-4, atol=1e-5)


def speak(decoder, draw):
    for lengths, mask in (((6, 1, 4), True), ((7,), False)):
        B, Tk = len(lengths), max(lengths)
        for T in (10, 2):
            seen = draw.seen(lengths, Tk) if mask else None
            yield decoder(draw(B, Tk, 6), draw(B, T, 3), seen), decoder.context, decoder.query


@pytest.mark.parametrize("kind", ["sigmoid", "windows"])
def test_the_decoder_trains(kind):
    decoder = model(kind).decoder
    same_after_training(decoder, speak)
    serve(decoder)
    assert operators(decoder.train(), speak) == 2, "all targets but those of one step"


def test_windows_in_evaluation_are_its_own():
    decoder = model("windows").decoder
    serve(decoder)
    assert operators(decoder.eval(), speak) == 0
    decoder.train().attention.eval()  # which makes the windows
    with torch.no_grad():
        assert operators(decoder, speak) == 0
