"""ESPnet's Tacotron 2 decoder, called by teacher forcing."""

from __future__ import annotations

import copy

import pytest
import torch
from integrations import test_espnet
from integrations.common import (
    compare,
    operators,
    real,
    same_after_training,
    same_training_step,
    serve,
)

import attnfast

tacotron2 = real("espnet2.legacy.nets.pytorch_backend.tacotron2.decoder")


def decoder(name="AttLoc", **more):
    torch.manual_seed(0)
    sizes = {
        "dlayers": 2, "dunits": 5, "prenet_layers": 2, "prenet_units": 3, "postnet_layers": 2,
        "postnet_chans": 4, "postnet_filts": 3, "zoneout_rate": 0.3,
    }  # fmt: skip
    return tacotron2.Decoder(6, 4, test_espnet.make(name), **{**sizes, **more})


def speak(module, draw):
    for lengths in ((7, 1, 4), (3, 3)):
        B, source = len(lengths), draw(len(lengths), max(lengths), 6)
        for T in (7, 4, 3):
            yield module(source, draw.numbers(*lengths), draw(B, T, 4))


FORMS = {
    "its defaults": {},
    "without zoneout": {"zoneout_rate": 0.0},
    "the last weights": {"cumulate_att_w": False},
    "two frames a step": {"reduction_factor": 2},
    "three frames a step, no zoneout": {"reduction_factor": 3, "zoneout_rate": 0.0},
    "without contexts": {"use_concate": False},
    "one layer, no prenet or postnet": {"dlayers": 1, "prenet_layers": 0, "postnet_layers": 0},
    "three layers, activated": {"dlayers": 3, "output_activation_fn": torch.tanh},
    "no dropout": {"dropout_rate": 0.0},
    "everything dropped": {"dropout_rate": 1.0, "zoneout_rate": 1.0},
}


@pytest.mark.parametrize("form", FORMS)
def test_decoder(form):
    """The prenet, and in training the cells, have the same random numbers."""
    plain = decoder(**FORMS[form])
    compare(plain, speak)
    serve(plain)
    steps = [T // plain.reduction_factor for T in (7, 4, 3) * 2]
    assert operators(plain, speak) == 2 * sum(T > 1 for T in steps), "the first frame, the others"


@pytest.mark.parametrize("form", FORMS)
def test_decoder_trains(form):
    """Results are scaled, because larger steps of training would diverge."""

    def use(module, draw):
        return ([0.1 * x for x in results] for results in speak(module, draw))

    same_after_training(decoder(**FORMS[form]), use)


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_of_its_loop(training):
    """The generator moves on as in its own loop."""
    plain, numbers = decoder().train(training), []
    served = copy.deepcopy(plain)
    attnfast.replace(served)
    for module in (plain, served):
        torch.manual_seed(0)
        assert operators(module, speak) == (0 if module is plain else 12)
        numbers.append(torch.rand(3))
    assert torch.equal(*numbers)


def test_large_layers():
    """A single frame of these runs in a loop, and the others in one operator."""
    plain = decoder(dunits=512, prenet_units=16)
    plain.att = test_espnet.espnet.AttLoc(6, 512, 7, 3, 2)
    plain.double()
    served = copy.deepcopy(plain)
    serve(served)
    source, lengths, speech = torch.randn(2, 9, 6), torch.tensor([9, 5]), torch.randn(2, 12, 4)
    same_training_step(plain, served, lambda m: m(source.double(), lengths, speech.double()))


def test_cells_of_which_some_zone_out():
    plain = decoder()
    plain.lstm[0] = plain.lstm[0].cell
    compare(plain, speak)


def test_synthesis_between_steps_of_training():
    """Its own code runs single frames, with the attention replaced."""
    plain = decoder()
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["", "att"]
    source, lengths, speech = torch.randn(3, 7, 6), torch.tensor([7, 2, 5]), torch.randn(3, 6, 4)
    for _ in range(2):
        same_training_step(plain.train(), served.train(), lambda m: m(source, lengths, speech))
        spoken = []
        for m in (plain.eval(), served.eval()):
            torch.manual_seed(1)
            with torch.no_grad():
                spoken.append(m.inference(source[0], maxlenratio=1.5))
                spoken.append(m.calculate_all_attentions(source, lengths, speech))
        half = len(spoken) // 2
        torch.testing.assert_close(spoken[:half], spoken[half:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["AttForwardTA", "AttAdd"])
def test_loops_that_no_operator_runs(name):
    plain = decoder(name, cumulate_att_w=False)
    report = attnfast.replace(copy.deepcopy(plain))
    assert f"no operator runs whole targets of {name}" in str(report.replaced[0])
    assert [x.path for x in report.replaced] == ["", "att"]
    compare(plain, speak, (torch.float64,))


@pytest.mark.parametrize(
    "name",
    ["lstm.0", "lstm.1.cell", "prenet", "prenet.prenet.0", "prenet.prenet.1.1", "att",
     "att.loc_conv", "feat_out", "prob_out"],
)  # fmt: skip
def test_hooks_in_a_decoder(name):
    served, calls = decoder(), []
    attnfast.replace(served)
    served.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert operators(served, speak) == 0 and calls


def test_another_prenet_runs_in_its_own_loop():
    """One that drops features in training only, as other projects' do."""
    plain = decoder()
    cls = type("Prenet", (type(plain.prenet),), {})

    def forward(self, x):
        for layer in self.prenet:
            x = torch.nn.functional.dropout(layer(x), self.dropout_rate, self.training)
        return x

    cls.forward, plain.prenet.__class__ = forward, cls
    [found] = [x for x in attnfast.replace(plain).found if x.path == ""]
    assert found.adapter.name.endswith("with its own loop")
    assert "results differ" in str(found)
