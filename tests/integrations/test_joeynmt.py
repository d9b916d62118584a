"""joeynmt: the real modules, and its recurrent decoder whole."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, greedy_tokens, real, same_training_step

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
    assert [x.path for x in attnfast.replace(served).replaced] == ["decoder.attention"]
    source, lengths = torch.randn(3, 7, 12), torch.tensor([7, 5, 2])
    words = torch.randint(20, (3, 6))
    same_training_step(plain, served, lambda m: m.step(words, m.start(source, lengths)))
    start = torch.full((3, 1), 2)
    tokens = [greedy_tokens(m, source, lengths, start) for m in (plain, served)]
    assert torch.equal(*tokens)
