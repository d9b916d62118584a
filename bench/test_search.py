"""Times searches by the reference models: one call, and the same model in plain PyTorch.

``attnfast`` searches in one operator; ``attnfast, int8`` too, with weights in 8 bits, on a CPU;
``attnfast, step by step`` calls its operators at every step.
The model has the command line's sizes and random parameters, and the end is improbable: every
translation is as long as it may be, twice its source and ten words.
"""

import pytest
import torch
from compare import DEVICE, compare

from attnfast.decoding import beam_search, search
from attnfast.models import EOS, Config, build

BATCHES = {
    "one sentence": (1, 13, 13),
    "8 sentences": (8, 13, 13),
    "64 sentences": (64, 13, 13),
    "64 sentences of 5 to 21 words": (64, 5, 21),
}
MODELS = {
    "Bahdanau": {"attention": "bahdanau"},
    "general, input feeding": {
        "attention": "general",
        "recurrence": "input_feeding",
        "readout": "attentional",
    },
}


@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("beam", [1, 5])
def test_search(benchmark, beam, kind, shape, monkeypatch):
    (B, shortest, Tk), V = BATCHES[shape], 4000
    models, int8 = {}, "int8"  # a model of its own, with packed parameters of its own
    for name in (None, int8, "reference"):
        torch.manual_seed(0)
        backend = None if name == int8 else name
        models[name] = build(Config(V, **MODELS[kind]), backend).to(DEVICE).eval()
        torch.nn.init.constant_(models[name].bias[EOS], -10.0)
    source = torch.randint(4, V, (B, Tk), device=DEVICE)
    lengths = torch.randint(shortest, Tk + 1, (B,))
    lengths[0] = Tk
    run_operator = search._run_operator

    def run(backend, operator=run_operator, **options):
        with monkeypatch.context() as patched:
            patched.setattr(search, "_run_operator", operator)
            return beam_search(models[backend], source, lengths, beam, **options).best

    calls = {
        "attnfast": lambda: run(None),
        "attnfast, int8": lambda: run(int8, int8=True),
        "attnfast, step by step": lambda: run(None, lambda *_, **__: None),
        "eager": lambda: run("reference"),
    }
    if DEVICE.type != "cpu":
        del calls["attnfast, int8"]
    first, *others = (call() for name, call in calls.items() if name != "attnfast, int8")
    for words in others:  # but for scores that differ by rounding
        assert sum(a == b for a, b in zip(words, first)) > 0.95 * B
    assert max(len(x) for x in first) > 2 * Tk
    name = "greedy search" if beam == 1 else f"beam of {beam}"
    compare(benchmark, f"{name}, {kind}", shape, (B, Tk, V), "forward", calls)
    benchmark.extra_info["size_names"] = "B, Tk, V"
