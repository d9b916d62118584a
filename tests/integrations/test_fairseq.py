"""fairseq's attention: a double of its recurrent decoder's."""

from __future__ import annotations

import pytest
import torch
from integrations.common import compare
from integrations.reference_projects import AttentionLayer

import attnfast


def use(attention, draw):
    for B, Tk, lengths in ((3, 7, (7, 1, 4)), (2, 3, (3, 2))):
        source, padding = draw(Tk, B, 6), ~draw.seen(lengths, Tk).t()
        for mask in (padding, padding, None, padding.flip(0)):
            yield attention(draw(B, 4), source, mask)


@pytest.mark.parametrize("bias", [False, True])
def test_attention(bias):
    torch.manual_seed(0)
    compare(AttentionLayer(4, 6, 5, bias), use, [torch.float32])  # its own scores are float32


def test_beams_are_reordered():
    plain, served = AttentionLayer(4, 6, 5), AttentionLayer(4, 6, 5)
    served.load_state_dict(plain.state_dict())
    assert attnfast.replace(served).replaced
    source, query = torch.randn(7, 4, 6), torch.randn(4, 4)
    padding = torch.arange(7).unsqueeze(1) >= torch.tensor([7, 2, 5, 7])
    with torch.no_grad():
        for order in ([0, 1, 2, 3], [1, 1, 0, 3], [2, 0], [3]):
            states, mask = source.index_select(1, torch.tensor(order)), padding[:, order]
            for q in (query, query.flip(1)):
                args = q[: len(order)], states, mask
                torch.testing.assert_close(served(*args), plain(*args))


def test_another_class_of_that_name_is_not_known():
    class AttentionLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.input_proj = torch.nn.Linear(4, 6, bias=False)
            self.output_proj = torch.nn.Linear(10, 5, bias=False)

    assert "not known" in str(attnfast.replace(AttentionLayer()))
