"""bastings's annotated encoder-decoder, a double; its decoding reads the weights that it keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, preparations, same_training_step
from integrations.reference_projects import AnnotatedAttention

import attnfast


def make():
    torch.manual_seed(0)
    return AnnotatedAttention(hidden_size=5, key_size=8, query_size=6)


def use(attention, draw):
    for lengths in ((7, 1, 4), (3,)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, 8), draw.seen(lengths, Tk).unsqueeze(1)
        key = attention.key_layer(source)
        for mask in (seen, seen.long(), seen):
            result = attention(query=draw(B, 1, 6), proj_key=key, value=source, mask=mask)
            assert attention.alphas is result[1]
            yield result


def test_attention():
    compare(make(), use)
    assert preparations(make(), use) == 2


def test_a_mask_is_required():
    attention = make()
    attnfast.replace(attention, strict=True)
    with pytest.raises(AssertionError, match="mask is required"):
        attention(torch.randn(2, 1, 6), torch.randn(2, 4, 5), torch.randn(2, 4, 8))


def test_other_queries_run_its_own_code():
    plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    query, key, value = torch.randn(2, 4, 6), torch.randn(2, 4, 5), torch.randn(2, 4, 8)
    inputs = query, key, value, torch.ones(2, 1, 4)
    torch.testing.assert_close(served(*inputs), plain(*inputs))


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.cell = make(), torch.nn.GRUCell(8, 6)

    def forward(self, source, mask, steps=4):
        key, state, kept = self.attention.key_layer(source), source.new_zeros(len(source), 6), []
        for _ in range(steps):
            context, _ = self.attention(state.unsqueeze(1), key, source, mask)
            state = self.cell(context.squeeze(1), state)
            kept.append(self.attention.alphas)
        return state, torch.cat(kept, 1)


def test_a_whole_decoder():
    plain = Decoder()
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["attention"]
    source, mask = torch.randn(3, 5, 8), torch.arange(5) < torch.tensor([[[5]], [[2]], [[4]]])
    for _ in range(2):
        same_training_step(plain, served, lambda m: m(source, mask))
