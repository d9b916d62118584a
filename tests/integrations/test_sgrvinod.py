"""sgrvinod's captioning, a double: scores with the rectifier, a batch that shrinks."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations.common import compare, operators, same_after_training, same_training_step, serve
from integrations.plain import projections
from integrations.reference_projects import CaptionAttention, CaptionDecoder

import attnfast
from attnfast.integrations import attend_to_source


def use(attention, draw):
    for pixels in (7, 4):
        source = draw(4, pixels, 6)
        for B in (4, 4, 3, 3, 1):
            yield attention(source[:B], draw(B, 5))
        yield attention(source * 2, draw(4, 5))


def test_attention():
    torch.manual_seed(0)
    compare(CaptionAttention(6, 5, 8), use)


def test_a_batch_that_shrinks_is_prepared_once_for_each_size():
    torch.manual_seed(0)
    attention = CaptionAttention(6, 5, 8)
    attnfast.replace(attention, strict=True)
    source = torch.randn(4, 7, 6, requires_grad=True)
    with projections() as projected:
        for B in (4, 4, 4, 3, 3, 1):
            attention(source[:B], torch.randn(B, 5))
    assert projected.call_count == 3


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("grad", [False, True])
def test_infinite_scores_are_nan(sign, grad):
    """As in its own code, where a softmax has no finite largest score."""
    torch.manual_seed(0)
    plain = CaptionAttention(6, 5, 8)
    for m in (plain.encoder_att, plain.decoder_att, plain.full_att):
        m.weight.data.abs_()
    plain.full_att.weight.data.mul_(sign)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    source, query = torch.rand(4, 7, 6), torch.rand(4, 5)
    query[0] = torch.inf  # every score
    query[1, 0] = torch.nan
    source[2, 3] = 1e38  # one score overflows
    with torch.set_grad_enabled(grad):
        want, got = plain(source, query), served(source, query)
    assert want[1][:2].isnan().all() and not want[1][3].isnan().any()
    torch.testing.assert_close(got[1], want[1], equal_nan=True)
    assert torch.equal(got[0].isnan(), want[0].isnan())


def test_hidden_keys_are_no_reason_for_nan():
    torch.manual_seed(0)
    holder, key, value = torch.nn.Module(), torch.rand(3, 4, 6), torch.rand(3, 4, 5)
    weight, query = -torch.rand(6), torch.rand(3, 6)
    key[0, 2:], key[1], query[2] = torch.inf, torch.nan, torch.inf
    mask = torch.tensor([[True, True, False, False], [False] * 4, [True] * 4])
    lengths, whole = torch.tensor([2, 0, 4]), torch.ones(3, 4, dtype=torch.bool)
    for seen in ({"mask": mask}, {"lengths": lengths}, {"mask": whole, "lengths": lengths}):
        context, weights = attend_to_source(
            holder, query, key, value, weight, activation="relu", **seen
        )
        assert context[:2].isfinite().all() and weights[0].sum().isclose(torch.tensor(1.0))
        assert not weights[1].any() and weights[2].isnan().all() and context[2].isnan().all()


def test_another_activation_is_left_alone():
    attention = CaptionAttention(6, 5, 8)
    attention.relu = torch.nn.ELU()
    report = attnfast.replace(attention)
    assert "as sgrvinod's Attention, results differ by" in str(report)


WORDS = torch.arange(4).view(1, 4)


def make_decoder(dropout=0.5):
    torch.manual_seed(0)
    return CaptionDecoder(5, 4, 7, 11, 6, dropout)


def replaced(decoder):
    serve(decoder)
    return decoder


def caption(decoder, draw):
    """Caption three images at different lengths, and two with one word."""
    for counts in ([3, 6, 4], [2, 2]):
        B, lengths = len(counts), torch.tensor(counts).unsqueeze(1)
        yield decoder(draw(B, 3, 2, 6), draw.words(11, B, max(counts)), lengths)
    yield decoder(draw(B, 3, 2, 6), draw.words(11, B, max(counts)), lengths.int())


def test_decoder():
    compare(make_decoder(), caption, dtypes=(torch.float32,))
    assert operators(replaced(make_decoder()), caption) == 1  # one word is a single step


def test_a_decoder_trains_alike():
    same_after_training(make_decoder(), caption)


def test_another_gate_runs_step_by_step():
    decoder = make_decoder(dropout=0.0)
    decoder.sigmoid = torch.nn.Hardsigmoid()
    own = copy.deepcopy(decoder)
    assert operators(replaced(decoder), caption) == 0
    same_training_step(
        own, decoder, lambda m: m(torch.ones(1, 2, 2, 6), WORDS, torch.tensor([[4]]))
    )


def test_words_after_the_end_change_nothing():
    decoder = make_decoder(dropout=0.0)
    attnfast.replace(decoder, strict=True)
    images, captions = torch.randn(2, 3, 2, 6), torch.randint(11, (2, 6))
    counts = torch.tensor([[6], [3]])
    first = decoder(images, captions, counts)
    captions[1, 3:] = 0
    for x, y in zip(first, decoder(images, captions, counts)):
        assert x == y if isinstance(x, list) else torch.equal(x, y) or x.shape == captions.shape
    assert not first[0][1, 2:].any() and not first[3][1, 2:].any()
