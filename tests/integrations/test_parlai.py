"""ParlAI: the real attention of its recurrent agent, and its whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, real, same_training_step

import attnfast

parlai = real("parlai.agents.seq2seq.modules", "iopath", "requests", "pkg_resources", "yaml")
KINDS = ["dot", "general", "concat"]


def use(width, size=6, inputs=7):
    def calls(attention, draw):
        for lengths in ((7, 1, 4), (3,)):
            B, Tk = len(lengths), max(lengths)
            source, seen = draw(B, Tk, width), draw.seen(lengths, Tk)
            for mask in (seen, None, seen):
                state = draw(2, B, size)
                yield attention(draw(B, 1, inputs), state, (source, mask))
                yield attention(draw(B, 1, inputs), (state, draw(2, B, size)), (source, mask))

    return calls


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind, bidirectional):
    torch.manual_seed(0)
    attention = parlai.AttentionLayer(kind, 6, 7, bidirectional=bidirectional)
    compare(attention, use(12 if bidirectional else 6))


def test_weights_that_do_not_depend_on_the_source_are_left_alone():
    attention = parlai.AttentionLayer("local", 6, 7, attn_length=4)
    assert "its weights do not depend on the source" in str(attnfast.replace(attention))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_model(kind):
    torch.manual_seed(0)
    plain = parlai.Seq2seq(
        num_features=20, embeddingsize=8, hiddensize=12, numlayers=2, dropout=0, attention=kind,
        bidirectional=True, attention_time="post", longest_label=5,
    )  # fmt: skip
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["decoder.attention"]
    source, target = torch.randint(4, 20, (3, 7)), torch.randint(4, 20, (3, 5))
    source *= torch.arange(7) < torch.tensor([[7], [5], [2]])
    same_training_step(plain, served, lambda m: m(source, ys=target)[0])
