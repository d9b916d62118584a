"""OpenNMT-py and eole: the real modules, and OpenNMT's recurrent decoders whole."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from integrations.common import compare, greedy_tokens, real, same_training_step

import attnfast

PIPELINE = ("ahocorasick", "configargparse", "fasttext", "pyonmttok", "rapidfuzz", "spacy")
onmt = real("onmt.modules.global_attention", *PIPELINE, "yaml")
decoders = real("onmt.decoders.decoder", *PIPELINE, "yaml")
embeddings = real("onmt.modules.embeddings", *PIPELINE, "yaml")
eole = real("eole.modules.global_attention", "yaml")


def use(attention, draw, seen):
    for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 3, (3, 3))):
        source, mask = draw(B, Tk, attention.dim), seen(draw, lengths, Tk)
        yield attention(draw(B, 5, attention.dim), source, mask)
        for _ in range(3):
            yield attention(draw(B, attention.dim), source, mask)
        yield attention(draw(B, attention.dim), source)
        if getattr(attention, "linear_cover", None) is not None:
            yield attention(draw(B, attention.dim), source * 1, mask, draw(B, Tk))


def use_lengths(attention, draw):
    """The project's mask takes what is longer than a source, one for all, and fractions."""

    def numbers(change, draw, lengths, Tk):
        return change(draw.numbers(*lengths))

    for change in (lambda x: x, lambda x: x + 2, lambda x: x[:1] / 2):
        yield from use(attention, draw, partial(numbers, change))


def use_masks(attention, draw):
    yield from use(attention, draw, lambda draw, *seen: ~draw.seen(*seen).unsqueeze(1))


@pytest.mark.parametrize("weights", ["softmax", "sparsemax"])
@pytest.mark.parametrize("coverage", [False, True])
@pytest.mark.parametrize("kind", ["dot", "general", "mlp"])
def test_global_attention(kind, coverage, weights):
    compare(onmt.GlobalAttention(9, coverage, kind, weights), use_lengths)
    if weights == "softmax":  # eole 0.6.4 calls its own sparsemax with an argument it does not take
        compare(eole.GlobalAttention(9, coverage, kind), use_masks)


def test_an_inner_hook_that_comes_later_fires():
    plain = onmt.GlobalAttention(9, attn_type="mlp")
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    source, query = torch.randn(3, 7, 9), torch.randn(3, 9)
    for m in (plain, served):
        m(query, source)
        m.linear_out.register_forward_hook(lambda module, args, out: 3 * out)
    torch.testing.assert_close(served(query, source), plain(query, source))


class Model(torch.nn.Module):
    """OpenNMT's recurrent decoder on an encoder of its own."""

    def __init__(self, decoder, kind, **more):
        super().__init__()
        words = embeddings.Embeddings(12, 20, word_padding_idx=1)
        self.encoder = torch.nn.LSTM(12, 16, batch_first=True)
        self.decoder = decoder("LSTM", False, 1, 16, kind, embeddings=words, **more)
        self.out = torch.nn.Linear(16, 20)
        for p in self.parameters():  # OpenNMT leaves that to its training: words have no values yet
            torch.nn.init.uniform_(p, -0.3, 0.3)

    def start(self, source, lengths):
        states, final = self.encoder(source)
        self.decoder.init_state(None, None, final)
        return states, lengths

    def step(self, words, memory):
        out, attns = self.decoder(words.unsqueeze(-1), memory[0], src_len=memory[1])
        return self.out(out), attns["std"]


@pytest.mark.parametrize("kind", ["general", "sparsemax", "mlp"])
@pytest.mark.parametrize("decoder", ["StdRNNDecoder", "InputFeedRNNDecoder", "with coverage"])
def test_whole_decoders(decoder, kind):
    torch.manual_seed(0)
    more = {"coverage_attn": True} if decoder == "with coverage" else {}
    name = "InputFeedRNNDecoder" if more else decoder
    if kind == "sparsemax":
        kind, more = "general", {**more, "attn_func": "sparsemax"}
    plain = Model(getattr(decoders, name), kind, **more)
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    whole = decoder != "StdRNNDecoder"
    assert [x.path for x in report.replaced] == ["decoder"] * whole + ["decoder.attn"]
    source, lengths = torch.randn(3, 7, 12), torch.tensor([7, 2, 5])
    words = torch.randint(2, 20, (3, 6))
    same_training_step(plain, served, lambda m: m.step(words, m.start(source, lengths)))
    start = torch.full((3, 1), 2)
    tokens = [greedy_tokens(m, source, lengths, start) for m in (plain, served)]
    assert torch.equal(*tokens)
