"""OpenOCR: the attention inside its SAR and ASTER decoders."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from integrations.common import alone, compare, preparations, same_training_step

import attnfast

sar = alone("openocr.openrec.modeling.decoders.sar_decoder")
aster = alone("openocr.openrec.modeling.decoders.aster_decoder")

OTHERS = {"mask": False, "pred_concat": False, "use_lstm": False, "dec_drop_rnn": 0.3}


def decoder(**options):
    torch.manual_seed(0)
    return sar.SARDecoder(6, 9, max_len=4, **{"enc_drop_rnn": 0.0, "pred_dropout": 0.0, **options})


def use(decoder, draw):
    for shape, ratios in (((3, 6, 2, 5), (1.0, 0.3, 0.7)), ((2, 6, 3, 4), (0.5, 2.0))):
        features = draw(*shape)
        for T in (2, 3, 3):
            tokens = draw(len(features), T, 6)
            yield decoder._2d_attation(features, tokens, [None, ratios], decoder.training)


def test_attention():
    compare(decoder(), use)


def test_a_source_is_prepared_once():
    assert preparations(decoder(), use) == 2


@pytest.mark.parametrize("options", [{}, OTHERS])
def test_decoder(options):
    plain = decoder(**options)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served, strict=True).replaced
    features, words = torch.randn(3, 6, 2, 5), torch.randint(7, (3, 6))
    lengths, ratios = torch.tensor([4, 2, 3]), torch.tensor([1.0, 0.2, 0.6])
    same_training_step(plain, served, lambda m: m(features, [words, lengths, ratios]))
    with torch.no_grad():
        read = [m.eval()(features, [ratios]) for m in (plain, served)]
    torch.testing.assert_close(*read)


def test_keys_are_computed_once():
    served = decoder().eval()
    attnfast.replace(served, strict=True)
    conv = served.conv3x3_1
    with (
        torch.no_grad(),
        mock.patch.object(conv, "_conv_forward", wraps=conv._conv_forward) as called,
    ):
        served(torch.randn(3, 6, 2, 5), [torch.ones(3)])
    assert called.call_count == 1


def block():
    torch.manual_seed(0)
    return aster.Attn_Rnn_Block(6, 5, 4, 9, 7)


def read(block, draw):
    for B, Tk in ((3, 7), (1, 4)):
        source, state = draw(B, Tk, 6), torch.zeros(1, B, 5, dtype=draw.dtype)
        for _ in range(3):
            output, state = block(source, state, draw(B, 4))
            yield output, state


def test_a_block_of_aster():
    compare(block(), read)
    assert preparations(block(), read) == 2
