"""yoyodyne: its attention, and its soft-attention and pointer-generator models."""

from __future__ import annotations

import copy
import sys
from unittest import mock

import pytest
import torch
from integrations.common import compare, preparations, real, same_training_step

import attnfast


class Lightning(torch.nn.Module):
    """The attributes of a LightningModule that the models use without a trainer."""

    device, trainer = torch.device("cpu"), None

    def save_hyperparameters(self, ignore):
        pass


lightning = mock.MagicMock(LightningModule=Lightning, LightningDataModule=object)
UNUSED = ("wandb", "yaml", "yoyodyne.metrics", "yoyodyne.models.transducer")
NAMES = "lightning", "lightning.pytorch"
sys.modules |= dict.fromkeys(NAMES, lightning)
try:
    models = real("yoyodyne.models", *UNUSED)
    data = real("yoyodyne.data", *UNUSED)
finally:
    for name in NAMES:
        del sys.modules[name]


def use(attention, draw, layers=2):
    for lengths in ((7, 1, 4), (3, 3), (5,)):
        encoded, mask = draw(len(lengths), max(lengths), 6), ~draw.seen(lengths, max(lengths))
        for _ in range(3):
            yield attention(encoded, draw(len(lengths), layers, 5), mask)


def test_attention():
    torch.manual_seed(0)
    compare(models.modules.Attention(6, 5), use)
    compare(models.modules.Attention(6, 5), lambda m, draw: use(m, draw, layers=1))


def test_a_source_is_prepared_once():
    assert preparations(models.modules.Attention(6, 5), use) == 3


def model(kind, cell, features=False, beam=1, layers=2, dropout=0.0, size=4, width=6, words=12):
    torch.manual_seed(0)
    encoder = getattr(models.modules, f"{cell}Encoder")
    encoders = [
        encoder(embedding_size=5, hidden_size=width // 2, layers=layers, dropout=0.0)
        for _ in range(2)
    ]
    return getattr(models, f"{kind}{cell}Model")(
        source_encoder=encoders[0], features_encoder=encoders[1] if features else False,
        embedding_size=5, decoder_hidden_size=size, decoder_layers=layers, decoder_dropout=dropout,
        vocab_size=words, target_vocab_size=words, max_target_length=9, compute_accuracy=False,
        beam_width=beam,
    )  # fmt: skip


def force(model, draw):
    """Decode what an encoder returns, teacher forcing the targets, and once without a target."""
    for lengths in ((7, 1, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        inputs = [draw(B, Tk, 6), ~draw.seen(lengths, Tk)]
        if hasattr(model, "generation_probability"):
            inputs.insert(0, draw.words(12, B, Tk))
        for T in (5, 1, 2, 3):
            yield model.greedy_decode_train_validate(*inputs, target=draw.words(12, B, T))
        yield model.greedy_decode_train_validate(*inputs)


def batch():
    torch.manual_seed(1)
    source, features, target = (
        data.PaddedTensor([torch.randint(4, 12, (n,)) for n in lengths])
        for lengths in ((6, 3, 5), (2, 2, 1), (4, 7, 2))
    )
    return source, features, target


KINDS = [(kind, cell) for kind in ("SoftAttention", "PointerGenerator") for cell in ("GRU", "LSTM")]


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize(("kind", "cell"), KINDS)
def test_models(kind, cell, features):
    plain, (source, extra, target) = model(kind, cell, features), batch()
    served = copy.deepcopy(plain)
    several = features and kind == "PointerGenerator"
    report = attnfast.replace(served)
    first = "features_attention" if several else ""
    assert sorted(x.path for x in report.replaced) == sorted([first, "decoder.attention"])
    assert ("it attends to features, too" in str(report)) == several
    whole = data.Batch(source, extra if features else None, target)
    same_training_step(plain, served, lambda m: m(whole))
    for beam in (1, 3):
        found = []
        for m in (plain, served):
            m.beam_width = beam
            with torch.inference_mode():
                found.append(m.eval()(whole))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
