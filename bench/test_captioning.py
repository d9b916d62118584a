"""Times a training step of show, attend and tell against the same model as people write it.

Its peer has the same CNN, a loop of ``nn.LSTMCell`` and eager attention. The second shape is the
common one of captioning, a trained network's grid of 14 × 14 × 2048, which is given.
"""

import copy

import pytest
import torch
from compare import DEVICE, compare
from peers import eager, eager_dot
from torch import Tensor, nn

from attnfast._utils.benchmark import memory_of
from attnfast.models import BOS, EOS, CaptionOutput, GridEncoder, ShowAttendTell, sequence_loss
from attnfast.models.show_attend_tell import masked_mean
from attnfast.nn import BahdanauAttention, LuongAttention


class Given(nn.Module):
    """A grid that is there already, ``[B, F, R, C]``."""

    def __init__(self, features: int):
        super().__init__()
        self.output_dim = features

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        inside = torch.ones_like(images[:, 0], dtype=torch.bool)
        return images.permute(0, 2, 3, 1).contiguous(), inside


SHAPES = {  # B, channels, rows, columns, H, A, E, V, words
    "scenes": (64, 1, 48, 48, 128, 64, 64, 40, 30),
    "14 x 14 x 2048": (32, 2048, 14, 14, 512, 512, 512, 4000, 20),
}
ENCODERS = {
    "scenes": lambda: GridEncoder(1, (16, 32, 64, 128), (1, 2, 2, 1)),
    "14 x 14 x 2048": lambda: Given(2048),
}
ATTENTIONS = {
    "additive": (lambda H, F, A: BahdanauAttention(H, F, A), eager),
    "general": (lambda H, F, A: LuongAttention(H, F, "general"), eager_dot),
}


class Peer(nn.Module):
    """The same model in PyTorch's own layers, of the same parameters."""

    def __init__(self, model: ShowAttendTell, attend):
        super().__init__()
        self.model, self.attend, decoder = copy.deepcopy(model), attend, model.decoder
        self.cell = nn.LSTMCell(decoder.weight_ih_l0.shape[1], decoder.hidden_size)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self.cell.load_state_dict({x: getattr(decoder, f"{x}_l0") for x in names})

    def forward(self, images: Tensor, sizes: Tensor, target_in: Tensor) -> CaptionOutput:
        model = self.model
        grid, mask = model.encoder(images, sizes)
        states = grid.flatten(1, 2)
        mean = masked_mean(states, mask.flatten(1))
        h, c = (layer(mean).tanh() for layer in (model.first_hidden, model.first_cell))
        lengths = torch.full((len(states),), states.shape[1], device=states.device)
        attend = self.attend(model.decoder.attention, states, lengths)
        embedded, read = model.embedding(target_in), []
        for word in embedded.unbind(1):
            context = attend(h)
            h, c = self.cell(torch.cat([word, context], -1), (h, c))
            read.append(torch.cat([h, context], -1))
        logits = model.output(embedded + model.readout(torch.stack(read, 1)))
        return CaptionOutput(logits, mask)


def step(model: nn.Module, batch: tuple[Tensor, ...]):
    """Return a call of loss and gradients."""

    def loss() -> Tensor:
        return sequence_loss(model(*batch[:3]).logits, batch[3])

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        return value.detach()

    return run, loss


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_training_step(benchmark, kind, shape):
    B, channels, rows, columns, H, A, E, V, words = SHAPES[shape]
    torch.manual_seed(0)
    make, attend = ATTENTIONS[kind]
    encoder = ENCODERS[shape]()
    model = ShowAttendTell(encoder, make(H, encoder.output_dim, A), V, H, E).to(DEVICE)
    images = torch.randn(B, channels, rows, columns)
    said = torch.randint(EOS + 1, V, (B, words))
    before = nn.functional.pad(said, (1, 0), value=BOS)
    after = nn.functional.pad(said, (0, 1), value=EOS)
    sizes = torch.tensor([[rows, columns]]).expand(B, 2)
    batch = tuple(x.to(DEVICE) for x in (images, sizes, before, after))
    ways = {"attnfast": step(model, batch), "eager": step(Peer(model, attend).to(DEVICE), batch)}
    values = [run() for run, _ in ways.values()]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    calls = {name: run for name, (run, _) in ways.items()}
    direction = "forward + backward"
    compare(benchmark, f"captioning, {kind}", shape, SHAPES[shape], direction, calls)
    benchmark.extra_info["size_names"] = "B, channels, rows, columns, H, A, E, V, words"
    benchmark.extra_info["kept"] = {name: memory_of(loss)[1] for name, (_, loss) in ways.items()}
