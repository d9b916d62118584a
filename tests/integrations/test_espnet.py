"""ESPnet: every attention of its recurrent decoders, and these decoders whole."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from integrations.common import (
    ProbeInputs,
    compare,
    operators,
    preparations,
    real,
    same_after_training,
    same_training_step,
    serve,
)

import attnfast
from attnfast.integrations.probe import tensors

espnet = real("espnet2.legacy.nets.pytorch_backend.rnn.attentions")
decoders = real("espnet2.asr.decoder.rnn_decoder")
searches = real("espnet2.legacy.nets.beam_search")
tacotron2 = real("espnet2.legacy.nets.pytorch_backend.tacotron2.decoder")

BOTH = (torch.float64, torch.float32)
SINGLE = (
    torch.float32,
)  # the project's own first weights are float32, whatever its parameters are
LOC = (3, 2)  # channels, filters
KINDS = {
    "AttDot": ((7,), BOTH),
    "AttAdd": ((7,), BOTH),
    "AttLoc": ((7, *LOC), BOTH),
    "AttCov": ((7,), SINGLE),
    "AttLocRec": ((7, *LOC), SINGLE),
    "AttCovLoc": ((7, *LOC), SINGLE),
    "AttForward": ((7, *LOC), BOTH),
    "AttForwardTA": ((7, *LOC, 4), BOTH),
    "GDCAttLoc": ((7, *LOC), BOTH),
    "AttMultiHeadDot": ((3, 4, 5), BOTH),
    "AttMultiHeadAdd": ((3, 4, 5), BOTH),
    "AttMultiHeadLoc": ((3, 4, 5, *LOC), SINGLE),
    "AttMultiHeadMultiResLoc": ((3, 4, 5, 3, 5), SINGLE),
}


def make(name, **more):
    torch.manual_seed(0)
    return getattr(espnet, name)(6, 5, *KINDS[name][0], **more)


def call(attention, draw, states, lengths, z, past, *args, **more):
    name = type(attention).__name__
    if name == "AttForwardTA":
        return attention(states, lengths, z, past, draw(len(states), 4), *args, **more)
    if name == "GDCAttLoc":
        durations = draw(len(states), states.shape[1], 1).sigmoid()
        return attention(states, lengths, durations, z, past, *args, **more)
    return attention(states, lengths, z, past, *args, **more)


def use(attention, draw, scaling=None, steps=3, cumulate=False):
    """Sources one after the other, each with several steps."""
    more = {} if scaling is None else {"scaling": scaling}
    for lengths in ((7, 1, 4), (3, 3), (5,)):
        attention.reset()
        states, past = draw(len(lengths), max(lengths), 6), None
        for step in range(steps):
            if getattr(attention, "han_mode", False):
                states = draw(len(lengths), max(lengths), 6)
            z = draw(len(lengths), 5) if step else None
            context, new = call(attention, draw, states, list(lengths), z, past, **more)
            past = past + new if cumulate and past is not None else new
            yield context, list(past) if isinstance(past, list) else past


@pytest.mark.parametrize("name", KINDS)
def test_every_attention(name):
    for scaling in (None, 0.7):
        compare(make(name), lambda m, draw, s=scaling: use(m, draw, s), KINDS[name][1])


@pytest.mark.parametrize("name", KINDS)
def test_a_source_is_prepared_once(name):
    """Once for each of three, and once for its filters."""
    filters = "Loc" in name or "Forward" in name or name == "AttCov"
    assert preparations(make(name), use) == (6 if filters and name != "AttLocRec" else 3)


def use_changed(attention, draw):
    """The list of weights is not always the one before and one more."""
    attention.reset()
    states, past = draw(2, 7, 6), None
    for change in range(6):
        context, past = attention(states, [7, 4], draw(2, 5), past)
        yield context, list(past)
        if change == 1:
            past[1] = 2 * past[1]
        elif change == 2:
            past[0].mul_(0.5)
        elif change == 3:
            past = past[:2]
        elif change == 4:
            past = past[::-1]


@pytest.mark.parametrize("name", ["AttCov", "AttCovLoc"])
def test_another_list_of_weights(name):
    compare(make(name), use_changed, SINGLE)


@pytest.mark.parametrize("name", [n for n in KINDS if "For" not in n and "GDC" not in n])
def test_hierarchical_attention(name):
    """Keys are made anew at every step."""
    compare(make(name, han_mode=True), use, KINDS[name][1])


def test_two_dimensional_filters_are_left_alone():
    report = attnfast.replace(espnet.AttLoc2D(6, 5, 7, 4, 3, 2))
    assert "skipped: its filters see more rows of weights than the last" in str(report)


WINDOWED = ["AttLoc", "AttForward", "AttForwardTA"]


def use_windows(attention, draw):
    """One source alone, attended to around a frame that moves."""
    attention.reset()
    states, past = draw(1, 9, 6), None
    for last in (0, 1, 4, 8):
        past = past if past is None else past.detach().clone()
        yield call(attention, draw, states, [9], draw(1, 5), past, last_attended_idx=last), past
        _, past = call(attention, draw, states, [9], draw(1, 5), past)
    yield call(attention, draw, states, [9], draw(1, 5), past.detach(), 1.0, 4, 2, 2)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_synthesis(name):
    compare(make(name), use_windows)


def test_windows_on_durations():
    """The project's own code, which changes its argument, takes turns with ours."""
    plain = make("GDCAttLoc")
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    with torch.no_grad():
        results = [
            list(tensors(use_windows(m, ProbeInputs(torch.float32, torch.device("cpu")))))
            for m in (plain, served)
        ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", WINDOWED)
def test_cumulated_weights(name):
    """ESPnet's Tacotron 2 may hand all weights so far to the next step."""
    compare(make(name), lambda m, draw: use(m, draw, cumulate=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_the_optimiser_between_utterances(name):
    plain = make(name)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    for _ in range(2):
        for attention in (plain, served):
            draw = ProbeInputs(torch.float32, torch.device("cpu"))
            optimiser = torch.optim.SGD(attention.parameters(), 0.1)
            sum(context.square().sum() for context, _ in use(attention, draw)).backward()
            optimiser.step()
            optimiser.zero_grad()
    for a, b in zip(plain.parameters(), served.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_that_change_between_two_steps(name):
    """Only what the project keeps of a source stays."""
    plain = make(name)
    served = copy.deepcopy(plain)
    assert attnfast.replace(served).replaced
    results = []
    for attention in (plain, served):
        draw, steps = ProbeInputs(torch.float32, torch.device("cpu")), []
        with torch.no_grad():
            for step in use(attention, draw):
                steps.append(step)
                for p in attention.parameters():
                    p.mul_(1.05)
        results.append(list(tensors(steps)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


#: Attention of whole decoders, and the types in which their own code runs.
WHOLE = {name: KINDS[name][1] for name in ("AttAdd", "AttLoc", "AttCov", "AttCovLoc")}


class Model(torch.nn.Module):
    """ESPnet's recurrent decoder on an encoder of its own."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.LSTM(4, 6, batch_first=True)
        self.decoder = decoders.RNNDecoder(11, 6, num_layers=2, hidden_size=5)
        self.decoder.att_list[0] = make(name)

    def forward(self, source, lengths, words, ends):
        return self.decoder(self.encoder(source)[0], lengths, words, ends)[0]

    @torch.no_grad()
    def search(self, source, lengths, beam):
        """Search beams for each source."""
        scorers, weights = {"decoder": self.decoder}, {"decoder": 1.0}
        search = searches.BeamSearch(scorers, weights, beam, 11, sos=10, eos=10)
        states = self.encoder(source)[0]
        found = [search(states[i, :n], maxlenratio=-6) for i, n in enumerate(lengths)]
        return [[hypothesis.yseq.tolist() for hypothesis in best] for best in found]


@pytest.mark.parametrize("name", ["AttDot", "AttLoc", "AttCovLoc", "AttForward", "AttMultiHeadLoc"])
def test_whole_decoders(name):
    """Steps of training, and between them searches with other batch sizes."""
    plain = Model(name)
    served = copy.deepcopy(plain)
    report = attnfast.replace(served)
    whole = ["decoder"] if name in WHOLE else []
    assert [x.path for x in report.replaced] == [*whole, "decoder.att_list.0"]
    source, lengths = torch.randn(3, 7, 4), torch.tensor([7, 2, 5])
    words, ends = torch.tensor([[4, 3, 2, 7], [1, 2, 0, 0], [5, 6, 8, 0]]), torch.tensor([4, 2, 3])
    for beam in (1, 3):
        same_training_step(plain, served, lambda m: m(source, lengths, words, ends))
        found = [model.search(source, lengths, beam) for model in (plain, served)]
        assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize("name", WINDOWED)
def test_the_decoder_of_tacotron_2(name):
    """Steps of training, and between them synthesis with and without windows."""
    plain = tacotron2.Decoder(
        6, 4, make(name), dlayers=1, dunits=5, prenet_layers=1, prenet_units=3, postnet_layers=0,
        cumulate_att_w=name == "AttLoc",
    )  # fmt: skip
    served = copy.deepcopy(plain)
    assert [x.path for x in attnfast.replace(served).replaced] == ["", "att"]
    source, lengths, speech = torch.randn(3, 7, 6), torch.tensor([7, 2, 5]), torch.randn(3, 4, 4)
    for constrained in (False, True):
        same_training_step(plain.train(), served.train(), lambda m: m(source, lengths, speech))
        options = {"use_att_constraint": constrained, "backward_window": 1, "forward_window": 2}
        spoken = []
        for m in (plain.eval(), served.eval()):
            torch.manual_seed(1)
            with torch.no_grad():
                spoken.append(m.inference(source[0], maxlenratio=1.5, **options))
        torch.testing.assert_close(*spoken, rtol=1e-4, atol=1e-5)


# ---- all steps of a target in one operator -------------------------------------------------------


def decoder(name="AttLoc", rnn="lstm", layers=1, residual=False, dropout=0.0, **more):
    whole = decoders.RNNDecoder(
        11, 6, rnn, layers, 5, context_residual=residual, dropout=dropout, **more
    )
    whole.att_list[0] = make(name)
    return whole


def read(module, draw):
    for lengths in ((7, 1, 4), (3, 3)):
        B, source = len(lengths), draw(len(lengths), max(lengths), 6)
        for T in (5, 1, 2):
            ends = draw.numbers(*(T - i % T for i in range(B)))
            yield module(source, draw.numbers(*lengths), draw.words(11, B, T), ends)


SHAPES = [("lstm", 1, False), ("gru", 3, True)]


@pytest.mark.parametrize(("rnn", "layers", "residual"), SHAPES)
@pytest.mark.parametrize("name", WHOLE)
def test_decoder(name, rnn, layers, residual):
    plain = decoder(name, rnn, layers, residual)
    compare(plain, read, WHOLE[name])
    serve(plain)
    assert operators(plain, read) == 4, "all targets but those of one word"


@pytest.mark.parametrize("name", WHOLE)
def test_decoder_trains(name):
    same_after_training(decoder(name, layers=2), read)


@pytest.mark.parametrize("layers", [1, 3])
def test_decoder_with_dropout(layers):
    """Queries and the states of all layers are dropped by the same random numbers."""
    plain = decoder("AttLoc", layers=layers, dropout=0.3)
    compare(plain, read)
    serve(plain)
    assert operators(plain.train(), read) == 4


def test_random_numbers_of_its_loop():
    """Python's generator moves on as in its own loop, which asks whether to sample a word."""
    plain, states = decoder(), []
    served = copy.deepcopy(plain)
    attnfast.replace(served)
    for module in (plain, served):
        random.seed(0)
        assert operators(module, read) == (0 if module is plain else 4)
        states.append(random.getstate())
    assert states[0] == states[1]


def test_decoders_that_are_left_alone():
    several = [
        (decoder("AttDot"), "no operator runs whole targets of AttDot"),
        (decoder("AttMultiHeadAdd"), "no operator runs whole targets of AttMultiHeadAdd"),
        (decoder(sampling_probability=0.5), "it samples words of its input"),
        (decoder(att_conf={"num_att": 2}), "it has several encoders or attention modules"),
    ]
    for module, why in several:
        report = attnfast.replace(module)
        [found] = [x for x in report.found if x.path == ""]
        assert why in found.skip_reason, report


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_words_that_are_sampled_later():
    served = decoder()
    attnfast.replace(served)
    served.sampling_probability = 0.5
    assert operators(served, read) == 0


@pytest.mark.parametrize(
    "name", ["decoder.0", "dropout_dec.0", "att_list.0", "att_list.0.mlp_dec", "att_list.0.gvec"]
)
def test_hooks_in_a_decoder(name):
    served, calls = decoder(), []
    attnfast.replace(served)
    served.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert operators(served, read) == 0 and calls
