"""docTR: the attention of its SAR, whose keys are a convolution's, and its decoder."""

from __future__ import annotations

import copy
import sys
from unittest import mock

import pytest
import torch
from integrations.common import alone, compare, preparations, same_training_step

import attnfast

UNUSED = ("torchvision", *(f"doctr.models.{x}" for x in ("classification", "utils")))
with mock.patch.dict(sys.modules, {"doctr.datasets": alone("doctr.datasets.vocabs")}):
    sar = alone("doctr.models.recognition.sar.pytorch", *UNUSED, "doctr.models.recognition.core")


def use(attention, draw):
    for shape in ((3, 6, 2, 5), (2, 6, 1, 3), (1, 6, 3, 4)):
        features = draw(*shape)
        for _ in range(3):
            yield attention(features, draw(shape[0], 5))
        yield attention(features.to(memory_format=torch.channels_last), draw(shape[0], 5))


def test_attention():
    torch.manual_seed(0)
    compare(sar.AttentionModule(6, 5, 7), use)


def test_a_source_is_prepared_once():
    assert preparations(sar.AttentionModule(6, 5, 7), use) == 6  # three, in two layouts


def decoder():
    torch.manual_seed(0)
    return sar.SARDecoder(6, 4, 5, 6, 7, feat_chans=6)


def inputs():
    return torch.randn(3, 6, 2, 5, requires_grad=True), torch.randn(3, 6)


def test_the_whole_decoder():
    plain = decoder()
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    assert [x.path for x in report.replaced] == ["attention_module"]
    (features, holistic), words = inputs(), torch.randint(5, (3, 5))
    same_training_step(plain, served, lambda m: m(features, holistic, words))
    for no_grad in (torch.no_grad, torch.inference_mode):
        with no_grad():
            sources = features.clone(), holistic.clone()
            torch.testing.assert_close(*(m.eval()(*sources) for m in (plain, served)))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_keys_are_computed_once(mode):
    served = decoder().eval()
    attnfast.replace(served, strict=True)
    conv = served.attention_module.feat_conv
    with mode(), mock.patch.object(conv, "_conv_forward", wraps=conv._conv_forward) as called:
        for n in (1, 2):
            served(*inputs())
            assert called.call_count == n


def test_a_convolution_with_other_settings():
    attention = sar.AttentionModule(6, 5, 7)
    attention.feat_conv = torch.nn.Conv2d(6, 7, 5, padding=4, dilation=2)
    compare(attention, lambda m, draw: (m(draw(2, 6, 4, 5), draw(2, 5)) for _ in range(2)))


class Scaled(torch.nn.Conv2d):
    """A convolution whose result depends on more than its parameters."""

    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@torch.no_grad()
def test_a_convolution_that_is_not_plain_is_computed_at_every_step():
    plain = sar.AttentionModule(6, 5, 7)
    plain.feat_conv = Scaled(6, 7, 3, padding=1)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    features, state = torch.randn(2, 6, 2, 5), torch.randn(2, 5)
    for scale in (1.0, 2.0):
        plain.feat_conv.scale = served.feat_conv.scale = scale
        torch.testing.assert_close(served(features, state), plain(features, state))
