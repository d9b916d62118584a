"""joeynmt: the real modules, and its recurrent decoder whole."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from integrations.common import compare, greedy_tokens, real, same_training_step, serve

import attnfast

UNUSED = ("datasets", "importlib_metadata", "matplotlib", "pandas", "sacrebleu", "sentencepiece",
          "subword_nmt", "tensorboard", "torch.utils.tensorboard", "tqdm", "yaml")  # fmt: skip
joeynmt = real("joeynmt.attention", *UNUSED)
decoders = real("joeynmt.decoders", *UNUSED)
encoders = real("joeynmt.encoders", *UNUSED)
KINDS = ["bahdanau", "luong"]


def make(kind):
    if kind == "luong":
        return joeynmt.LuongAttention(6, 9)
    return joeynmt.BahdanauAttention(hidden_size=5, key_size=9, query_size=6)


def use(attention, draw):
    for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 3, (3, 2))):
        source, seen = draw(B, Tk, 9), draw.seen(lengths, Tk).unsqueeze(1)
        attention.compute_proj_keys(keys=source)
        for mask in (seen, seen.long(), seen):
            yield attention(query=draw(B, 1, 6), mask=mask, values=source)
        attention.compute_proj_keys(source * 2)  # other keys for the same values
        yield attention(draw(B, 1, 6), seen, source)


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind):
    compare(make(kind), use)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_come_first(kind):
    attention = make(kind)
    attnfast.replace(attention)
    inputs = torch.randn(2, 1, 6), torch.ones(2, 1, 3), torch.randn(2, 3, 9)
    with pytest.raises(AssertionError, match="projection keys have to get pre-computed"):
        attention(*inputs)
    attention.compute_proj_keys(inputs[2])
    with pytest.raises(AssertionError):
        attention(inputs[0], inputs[1][:, :, :2], inputs[2])


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_another_training_step(kind):
    plain = make(kind).double()
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    torch.manual_seed(0)
    source, query = torch.randn(2, 4, 9).double(), torch.randn(2, 1, 6).double()
    seen = torch.ones(2, 1, 4)
    for attention in (plain, served):
        optimiser = torch.optim.SGD(attention.parameters(), 0.5)
        for _ in range(3):
            optimiser.zero_grad()
            attention.compute_proj_keys(source)
            attention(query, seen, source)[0].square().sum().backward()
            optimiser.step()
    torch.testing.assert_close(list(served.parameters()), list(plain.parameters()))


def make_decoder(kind="bahdanau", rnn_type="gru", num_layers=1, size=8, words=11, width=6, **more):
    return decoders.RecurrentDecoder(
        rnn_type, 5, size, SimpleNamespace(output_size=width), kind, num_layers, words, **more
    )


def unroll(decoder, draw):
    """Decode two targets, the second from states, in parts; a step alone is its own code's."""
    cells, width = 2 if decoder.type == "lstm" else 1, decoder.attention.key_layer.in_features
    for lengths in ((7, 1, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, width), draw.seen(lengths, Tk).unsqueeze(1)
        last, rest = draw(B, width), {}
        for T in (5, 1, 2):
            out = decoder(draw(B, T, 5), source, last, seen.long(), T, **rest)
            yield out
            rest = {"hidden": out[1], "prev_att_vector": out[3][:, -1:]}
        hidden = tuple(draw(B, decoder.num_layers, 8) for _ in range(cells))
        hidden = hidden if cells > 1 else hidden[0]
        yield decoder(draw(B, 6, 5), source, None, seen, unroll_steps=4, hidden=hidden)


@pytest.mark.parametrize(
    ("kind", "rnn_type", "input_feeding", "num_layers"),
    [
        ("bahdanau", "gru", True, 1), ("luong", "lstm", True, 3), ("luong", "gru", False, 1),
        ("bahdanau", "lstm", False, 3), ("bahdanau", "lstm", True, 3), ("luong", "gru", True, 1),
    ],
)  # fmt: skip
def test_decoder(kind, rnn_type, input_feeding, num_layers):
    """Dropout between layers takes the same random numbers."""
    torch.manual_seed(0)
    compare(
        make_decoder(kind, rnn_type, num_layers, input_feeding=input_feeding, dropout=0.4), unroll
    )


@pytest.mark.parametrize(("init_hidden", "width"), [("bridge", 6), ("zero", 6), ("last", 16)])
def test_first_states(init_hidden, width):
    torch.manual_seed(0)
    compare(make_decoder(init_hidden=init_hidden, num_layers=2, width=width), unroll)


DROPS = [{"emb_dropout": 0.4}, {"hidden_dropout": 0.3}]


@pytest.mark.parametrize(
    ("input_feeding", "drops"),
    [
        (False, DROPS[0]),
        (True, DROPS[1]),
        (True, DROPS[0] | DROPS[1]),
        (False, {"hidden_dropout": 1.0}),
    ],
)
def test_dropout(input_feeding, drops):
    """Words, fed vectors and the inputs of attentional vectors are dropped alike."""
    torch.manual_seed(0)
    plain = make_decoder(num_layers=2, dropout=0.2, input_feeding=input_feeding, **drops)
    compare(plain, unroll)
    serve(plain)
    inputs = torch.randn(2, 3, 5), torch.randn(2, 4, 6), torch.randn(2, 6), torch.ones(2, 1, 4), 3
    assert "recurrent layer: one operator on cpu" in str(attnfast.explain(plain.train(), *inputs))


class Model(torch.nn.Module):
    """joeynmt's recurrent decoder on its own encoder."""

    def __init__(self, kind, **more):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 12)
        self.encoder = encoders.RecurrentEncoder(hidden_size=7, emb_size=12, bidirectional=True)
        self.decoder = decoders.RecurrentDecoder(
            emb_size=12, hidden_size=10, encoder=self.encoder, attention=kind, vocab_size=20, **more
        )

    def start(self, source, lengths):
        seen = (torch.arange(source.shape[1]) < lengths.unsqueeze(1)).unsqueeze(1)
        states, final = self.encoder(source, lengths, seen)
        return {"encoder_output": states, "encoder_hidden": final, "src_mask": seen}

    def step(self, words, memory):
        out, hidden, weights, vectors = self.decoder(
            self.embedding(words), unroll_steps=words.shape[1], **memory
        )
        if not torch.is_grad_enabled():
            memory.update(hidden=hidden, prev_att_vector=vectors[:, -1:])
        return out, weights, vectors


@pytest.mark.parametrize("more", [{}, {"input_feeding": False, "rnn_type": "lstm"}])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_decoder(kind, more):
    torch.manual_seed(0)
    plain = Model(kind, **more)
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["decoder", "decoder.attention"]
    source, lengths = torch.randn(3, 7, 12), torch.tensor([7, 5, 2])
    words = torch.randint(20, (3, 6))
    same_training_step(plain, served, lambda m: m.step(words, m.start(source, lengths)))
    start = torch.full((3, 1), 2)
    tokens = [greedy_tokens(m, source, lengths, start) for m in (plain, served)]
    assert torch.equal(*tokens)
