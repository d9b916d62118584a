"""What people write: the loop of a recurrent decoder, and its attention in eager code."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast.nn import CoverageAttention


def alike(calls: Iterable[Callable[[], Sequence[Tensor]]]) -> None:
    """Assert that calls give the same tensors, to 1e-4 of the largest number."""
    first, *others = (call() for call in calls)
    for other in others:
        for got, want in zip(first, other):
            scale = float(want.detach().abs().max())
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * scale)


def decoder_step(layer, cell, recurrence: str, attend):
    """Return a step of a decoder, whose attention is ``attend(state, *memory)``.

    It takes a word and the state, cell state and fed vector of the step before, and returns these.
    """
    lstm = isinstance(cell, nn.LSTMCell)

    def step(word: Tensor, h: Tensor, c: Tensor, fed: Tensor, *memory) -> tuple[Tensor, ...]:
        if recurrence == "attend_first":
            fed = attend(h, *memory)
        inputs = torch.cat([word, fed], -1)
        h, c = cell(inputs, (h, c)) if lstm else (cell(inputs, h), c)
        if recurrence == "input_feeding":
            fed = torch.tanh(layer.output_proj(torch.cat([attend(h, *memory), h], -1)))
        return h, c, fed

    return step


def run_steps(x: Tensor, layer, cell, recurrence: str, step, *memory) -> Tensor:
    """Return the outputs of a decoder's steps over all words."""
    h = c = x.new_zeros(len(x), layer.hidden_size)
    fed = x.new_zeros(len(x), cell.input_size - x.shape[-1])
    outputs = []
    for word in x.unbind(1):
        h, c, fed = step(word, h, c, fed, *memory)
        outputs.append(fed if recurrence == "input_feeding" else h)
    return torch.stack(outputs, 1)


def keys_and_seen(attention, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the projected keys, and which of them are within the lengths."""
    seen = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
    return attention.key_proj(source), seen


def additive(attention):
    """Return Bahdanau's attention as people write it, of a state, keys and the source."""

    def attend(h: Tensor, keys: Tensor, seen: Tensor, source: Tensor) -> Tensor:
        scores = torch.tanh(attention.query_proj(h).unsqueeze(1) + keys) @ attention.score_vector
        weights = scores.masked_fill(~seen, -1e9).softmax(-1)
        return (weights.unsqueeze(1) @ source).squeeze(1)

    return attend


def eager(attention, source: Tensor, lengths: Tensor):
    """Return Bahdanau's attention to a source, as people write it."""
    attend, memory = additive(attention), keys_and_seen(attention, source, lengths)
    return lambda h: attend(h, *memory, source)


def eager_with_history(attention, source: Tensor, lengths: Tensor):
    """Return location-aware attention or coverage's as people write it."""
    keys, shape = attention.key_proj(source), source.shape[:2]
    hidden = (torch.arange(shape[1], device=source.device) >= lengths[:, None]).expand(shape)
    past = source.new_zeros(shape)

    def attend(h: Tensor) -> Tensor:
        nonlocal past
        if isinstance(attention, CoverageAttention):
            features = past.unsqueeze(-1) * attention.coverage_weight
        else:
            kernel = attention.location_conv.weight
            found = F.conv1d(past.unsqueeze(1), kernel, padding=kernel.shape[-1] // 2)
            features = attention.location_proj(found.transpose(1, 2))
        scores = torch.tanh(attention.query_proj(h).unsqueeze(1) + keys + features)
        weights = (scores @ attention.score_vector).masked_fill(hidden, -1e9).softmax(-1)
        past = past + weights if isinstance(attention, CoverageAttention) else weights
        return (weights.unsqueeze(1) @ source).squeeze(1)

    return attend


def eager_dot(attention, source: Tensor, lengths: Tensor):
    """Return Luong's dot or general attention as people write it."""
    keys, seen = keys_and_seen(attention, source, lengths)

    def attend(h: Tensor) -> Tensor:
        scores = (keys @ h.unsqueeze(-1)).squeeze(-1)
        weights = scores.masked_fill(~seen, -1e9).softmax(-1)
        return (weights.unsqueeze(1) @ source).squeeze(1)

    return attend
