"""Times a training step of listen, attend and spell against the same model as people write it.

Its peer has packed ``nn.LSTM`` layers in the pyramid, and a loop of ``nn.LSTMCell`` and eager
attention in the decoder. Beside it what a long recording takes, within a span and over all keys.
"""

import copy

import pytest
import torch
from compare import DEVICE, compare
from peers import eager, eager_dot, eager_with_history
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnfast._utils.benchmark import memory_of
from attnfast.models import BOS, EOS, LASOutput, ListenAttendSpell, PyramidEncoder, hybrid_loss
from attnfast.models.las import join_frames
from attnfast.nn import (
    BahdanauAttention,
    HardMonotonicWindowAttention,
    LocalAttention,
    LocationAwareAttention,
    LuongAttention,
)

SHAPES = {  # B, T, features, H, layers, letters
    "digits": (20, 400, 40, 128, 2, 28),
    "sentences": (16, 800, 80, 256, 3, 60),
    "one sentence": (1, 800, 80, 256, 3, 60),
}
VOCAB = 31
ATTENTIONS = {
    "location-aware": lambda H: LocationAwareAttention(2 * H, 2 * H, H, num_filters=10),
    "additive": lambda H: BahdanauAttention(2 * H, 2 * H, H),
    "dot": lambda H: LuongAttention(2 * H, 2 * H, "dot"),
}


def inputs(B: int, T: int, features: int, letters: int) -> tuple[Tensor, ...]:
    """Return frames, lengths, and letters before and after each step."""
    g = torch.Generator().manual_seed(0)
    frames = torch.randn(B, T, features, generator=g)
    lengths = torch.randint(3 * T // 4, T + 1, (B,), generator=g)
    words = torch.randint(EOS + 1, VOCAB, (B, letters), generator=g)
    before, after = (
        nn.functional.pad(words, (1, 0), value=BOS),
        nn.functional.pad(words, (0, 1), value=EOS),
    )
    return frames.to(DEVICE), lengths, before.to(DEVICE), after.to(DEVICE)


EAGER = {"location-aware": eager_with_history, "additive": eager, "dot": eager_dot}


class Peer(nn.Module):
    """The same model in PyTorch's own layers, of the same parameters."""

    def __init__(self, model: ListenAttendSpell, kind: str):
        super().__init__()
        self.model, self.kind, decoder = copy.deepcopy(model), kind, model.decoder
        self.cell = nn.LSTMCell(decoder.weight_ih_l0.shape[1], decoder.hidden_size)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self.cell.load_state_dict({x: getattr(decoder, f"{x}_l0") for x in names})

    def forward(self, frames: Tensor, lengths: Tensor, target_in: Tensor) -> LASOutput:
        model, x = self.model, frames
        for layer in model.encoder.layers:
            x, lengths = join_frames(x, lengths)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x = pad_packed_sequence(layer.layers[0](packed)[0], batch_first=True)[0]
        attend = EAGER[self.kind](model.decoder.attention, x, lengths.to(x.device))
        h = c = x.new_zeros(len(x), self.cell.hidden_size)
        context, outputs = x.new_zeros(len(x), x.shape[-1]), []
        for letter in model.embedding(target_in).unbind(1):
            h, c = self.cell(torch.cat([letter, context], -1), (h, c))
            context = attend(h)
            outputs.append(torch.cat([h, context], -1))
        logits = model.output(model.readout(torch.stack(outputs, 1)).tanh())
        return LASOutput(logits, model.ctc(x).log_softmax(-1), lengths)


def step(model: nn.Module, batch: tuple[Tensor, ...], ctc_weight: float = 0.3):
    """Return a call of loss and gradients."""

    def loss() -> Tensor:
        return hybrid_loss(model(*batch[:3]), batch[3], ctc_weight)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        return value.detach()

    return run, loss


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_training_step(benchmark, kind, shape):
    B, T, features, H, layers, letters = SHAPES[shape]
    torch.manual_seed(0)
    encoder = PyramidEncoder(features, H, layers)
    model = ListenAttendSpell(encoder, ATTENTIONS[kind](H), VOCAB, 2 * H, H // 2).to(DEVICE)
    batch = inputs(B, T, features, letters)
    ways = {"attnfast": step(model, batch), "eager": step(Peer(model, kind).to(DEVICE), batch)}
    values = [run() for run, _ in ways.values()]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    calls = {name: run for name, (run, _) in ways.items()}
    direction = "forward + backward"
    compare(benchmark, f"training step, {kind}", shape, SHAPES[shape], direction, calls)
    benchmark.extra_info["size_names"] = "B, T, features, H, layers, letters"
    benchmark.extra_info["kept"] = {name: memory_of(loss)[1] for name, (_, loss) in ways.items()}


#: Letters a second of speech, and states by which the window moves on at each.
RATE, STATES = 8, 25 / 8


@pytest.mark.parametrize("seconds", [7.5, 15, 30, 60])
def test_long_recording(benchmark, seconds):
    """One recording of frames of 10 ms, two layers: a state each 40 ms, a letter each 125 ms."""
    frames, letters, H = round(100 * seconds), round(RATE * seconds), 128
    batch = inputs(1, frames, 40, letters)
    batch = batch[0], torch.tensor([frames]), *batch[2:]
    calls, kept = {}, {}
    for name, attention, weight in (
        ("within 2 s to each side", LocalAttention(2 * H, 2 * H, 50, slope=STATES), 0.0),
        ("within 2 s from the last peak on", HardMonotonicWindowAttention(2 * H, 2 * H, 50), 0.0),
        ("all states", ATTENTIONS["location-aware"](H), 0.0),
        ("all states, and CTC", ATTENTIONS["location-aware"](H), 0.3),
    ):
        torch.manual_seed(0)
        encoder = PyramidEncoder(40, H, 2)
        model = ListenAttendSpell(encoder, attention, VOCAB, 2 * H, H // 2).to(DEVICE)
        calls[name], loss = step(model, batch, weight)
        kept[name] = memory_of(loss)[1]
    sizes = (1, frames, 40, H, 2, letters)
    compare(benchmark, "long recording", f"{seconds:g} s", sizes, "forward + backward", calls)
    benchmark.extra_info["size_names"] = "B, T, features, H, layers, letters"
    benchmark.extra_info["kept"] = kept
