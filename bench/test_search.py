"""Times searches by the reference models: one call, and the same model in plain PyTorch.

``attnfast`` searches in one operator; ``attnfast, step by step`` calls its operators at every step.
The model has the command line's sizes and random parameters, so that every translation is as long
as it may be: twice its source and ten words.
"""

import pytest
import torch
from compare import DEVICE, compare

from attnfast.decoding import beam_search, search
from attnfast.models import Config, build

BATCHES = {
    "one sentence": (1, 13, 13),
    "8 sentences": (8, 13, 13),
    "64 sentences": (64, 13, 13),
    "64 sentences of 5 to 21 words": (64, 5, 21),
}
MODELS = {
    "Bahdanau": {"attention": "bahdanau"},
    "general, input feeding": {"attention": "general", "input_feeding": True},
}


@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("beam", [1, 5])
def test_search(benchmark, beam, kind, shape, monkeypatch):
    (B, shortest, Tk), V = BATCHES[shape], 4000
    models = {}
    for backend in (None, "reference"):
        torch.manual_seed(0)
        models[backend] = build(Config(V, **MODELS[kind]), backend).to(DEVICE).eval()
    source = torch.randint(4, V, (B, Tk), device=DEVICE)
    lengths = torch.randint(shortest, Tk + 1, (B,))
    lengths[0] = Tk
    run_operator = search._run_operator

    def run(backend, operator=run_operator):
        with monkeypatch.context() as patched:
            patched.setattr(search, "_run_operator", operator)
            return beam_search(models[backend], source, lengths, beam).best

    calls = {
        "attnfast": lambda: run(None),
        "attnfast, step by step": lambda: run(None, lambda *_, **__: None),
        "eager": lambda: run("reference"),
    }
    first, *others = (call() for call in calls.values())
    assert all(x == first for x in others)
    assert max(len(x) for x in first) > 2 * Tk
    name = "greedy search" if beam == 1 else f"beam of {beam}"
    compare(benchmark, f"{name}, {kind}", shape, (B, Tk, V), "forward", calls)
    benchmark.extra_info["size_names"] = "B, Tk, V"
