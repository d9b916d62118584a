"""mmocr: the attention inside its SAR and ASTER decoders."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from integrations.common import alone, compare, preparations, same_training_step

import attnfast


class BaseModule(torch.nn.Module):
    """mmengine's, without the initialisation of parameters."""

    def __init__(self, init_cfg=None):
        super().__init__()


class Dictionary:
    num_classes, start_idx, padding_idx = 9, 7, 8


register = SimpleNamespace(register_module=lambda: lambda cls: cls)
PARTS = {
    "mmengine.model": SimpleNamespace(BaseModule=BaseModule),
    "mmocr.registry": SimpleNamespace(MODELS=register, TASK_UTILS=None),
    "mmocr.models.common.dictionary": SimpleNamespace(Dictionary=Dictionary),
}
with mock.patch.dict(sys.modules, PARTS):
    sar, aster = (
        alone(f"mmocr.models.textrecog.decoders.{name}_decoder", "mmengine", "mmocr.structures")
        for name in ("sar", "aster")
    )

KINDS = {"parallel": sar.ParallelSARDecoder, "sequential": sar.SequentialSARDecoder}


def decoder(kind, **options):
    torch.manual_seed(0)
    if kind == "aster":
        return aster.ASTERDecoder(6, 5, 5, 4, Dictionary(), max_seq_len=4)
    return KINDS[kind](Dictionary(), d_model=6, d_enc=5, d_k=7, max_seq_len=4, **options)


def parallel(decoder, draw):
    for shape, ratios in (((3, 6, 2, 5), [1.0, 0.3, 0.7]), ((2, 6, 3, 4), None)):
        features, holistic = draw(*shape), draw(shape[0], 1, 5)
        for T in (2, 3, 3):
            inputs = draw(shape[0], T, 5)
            yield decoder._2d_attention(inputs, features, holistic, valid_ratios=ratios)


def sequential(decoder, draw):
    for shape, ratios in (((3, 6, 2, 5), [1.0, 0.3, 0.7]), ((2, 6, 3, 4), None)):
        B = shape[0]
        features, holistic, *states = draw(*shape), *(draw(B, 5) for _ in range(5))
        for _ in range(3):
            word = draw(B, 5)
            output, *states = decoder._2d_attention(word, features, holistic, *states, ratios)
            yield output, states


def read(decoder, draw):
    for B, Tk in ((3, 7), (1, 4)):
        source, state = draw(B, Tk, 6), draw(1, B, 4)
        for word in draw.words(9, B, 3).unbind(1):
            output, state = decoder._attention(source, state, word)
            yield output, state


CALLS = {"parallel": parallel, "sequential": sequential, "aster": read}


@pytest.mark.parametrize("kind", CALLS)
def test_attention(kind):
    options = {} if kind == "aster" else {"dec_gru": True, "pred_concat": True}
    compare(decoder(kind, **options), CALLS[kind], training=(True,))


@pytest.mark.parametrize("kind", CALLS)
def test_a_source_is_prepared_once(kind):
    assert preparations(decoder(kind), CALLS[kind]) == 2


class Sample(dict):
    """The part of a TextRecogDataSample that decoders read."""

    def __init__(self, words, ratio):
        super().__init__(valid_ratio=ratio)
        self.gt_text = SimpleNamespace(padded_indexes=words)


def decode(kind, **options):
    """Compare a step of training and a greedy search of a whole decoder."""
    plain = decoder(kind, **options)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served, strict=True).replaced
    samples = [Sample(torch.randint(8, (4,)), ratio) for ratio in (1.0, 0.2, 0.6)]
    source = torch.randn(3, 7, 6) if kind == "aster" else torch.randn(3, 5)
    inputs = torch.randn(3, 6, 2, 5), source, samples
    same_training_step(plain, served, lambda m: m.forward_train(*inputs))
    if kind != "sequential" or not options.get("dec_gru"):  # whose search has no first word
        with torch.no_grad():
            torch.testing.assert_close(*(m.eval().forward_test(*inputs) for m in (plain, served)))


@pytest.mark.parametrize(
    "options", [{"pred_dropout": 0.3}, {"dec_gru": True, "pred_concat": True, "mask": False}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_sar(kind, options):
    decode(kind, **options)


def test_aster():
    decode("aster")
