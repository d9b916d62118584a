"""A project's classes in another package: their code is inspected, then the copies are served."""

from __future__ import annotations

import pytest
import torch
from integrations import test_espnet, test_espnet_tts, test_joeynmt, test_onmt, test_speechbrain
from integrations.common import compare, vendored

import attnfast


def espnet(name):
    return test_espnet.make(name), test_espnet.use, test_espnet.KINDS[name][1]


def speechbrain(name):
    cls, more, dtypes = test_speechbrain.KINDS[name]
    return cls(6, 5, 7, 4, *more), test_speechbrain.use, dtypes


def joeynmt(name):
    return test_joeynmt.make(name), test_joeynmt.use, (torch.float32,)


def onmt(name):
    attention = test_onmt.onmt.GlobalAttention(9, True, name)
    return attention, test_onmt.use_lengths, (torch.float32,)


def eole(name):
    attention = test_onmt.eole.GlobalAttention(9, True, name)
    return attention, test_onmt.use_masks, (torch.float32,)


def espnet_decoder(name):
    return test_espnet.decoder(name), test_espnet.read, test_espnet.WHOLE[name]


def espnet_tts_decoder(name):
    return test_espnet_tts.decoder(name), test_espnet_tts.speak, (torch.float64,)


def speechbrain_decoder(name):
    dtypes = test_speechbrain.KINDS[name][2]
    return test_speechbrain.decoder("lstm", name), test_speechbrain.read, dtypes


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (espnet, "AttDot"), (espnet, "AttLoc"), (espnet, "AttCovLoc"), (espnet, "AttForwardTA"),
        (espnet, "AttMultiHeadLoc"), (speechbrain, "content"), (speechbrain, "location"),
        (joeynmt, "bahdanau"), (joeynmt, "luong"), (onmt, "general"), (onmt, "mlp"),
        (eole, "mlp"), (espnet_decoder, "AttLoc"), (espnet_decoder, "AttCov"),
        (espnet_tts_decoder, "AttLoc"),
        (speechbrain_decoder, "content"), (speechbrain_decoder, "location"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_a_copy_is_served(make, name):
    """Adapters whose classes have the same name and parameters are tried one after the other."""
    attention, use, dtypes = make(name)
    compare(vendored(attention), use, dtypes[:1])


def test_a_copy_that_reads_more_is_left_alone():
    attention = vendored(espnet("AttLoc")[0])
    cls = type(attention)
    plain = cls.forward

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        context, weights = plain(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling)
        return context * self.gain, weights

    cls.forward, attention.gain = forward, 1.0
    (found,) = attnfast.replace(attention).skipped
    assert "its own code reads gain" in found.skip_reason


def test_a_subclass_of_the_same_name_is_no_original():
    """Its own code is inspected, although it extends the project's class."""
    attention = test_espnet.make("AttAdd")
    plain = type(attention).forward

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev):
        return plain(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=self.sharpness)

    cls = type("AttAdd", (type(attention),), {"forward": forward, "__module__": __name__})
    attention.__class__, attention.sharpness = cls, 2.0
    (found,) = attnfast.replace(attention).skipped
    assert "sharpness" in found.skip_reason


def test_a_class_that_only_has_the_name_and_the_parameters():
    """Without the attributes that an adapter asks for."""

    class GlobalAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear_out = torch.nn.Linear(18, 9, bias=False)

        def forward(self, src, enc_out, src_len=None, coverage=None):
            return src, enc_out

    GlobalAttention.__qualname__ = "GlobalAttention"  # as at the top of a file
    (found,) = attnfast.replace(GlobalAttention()).skipped
    assert "as eole's GlobalAttention, it is unlike" in found.skip_reason
    assert "as OpenNMT-py's GlobalAttention, it is unlike OpenNMT-py's" in found.skip_reason
