"""A memory that grows by a key at every step, against the ways to do without: docs/memory.md.

``python bench/growable.py`` prints how many times as long as ``memory.append`` and ``attend`` the
others take, medians of CPU time on one thread, and what each holds in training at most.
"""

import statistics
import time

import torch

from attnfast import Span, additive_attention, attend, dot_attention, prepare
from attnfast._utils.benchmark import peak_memory

ROUNDS = 3
STEPS = {"decoding": 1000, "reordered": 1000, "training": 200}


def growing(query, key, value, score_vector, order=None):
    memory, contexts = prepare(key[:, :0], value[:, :0], score_vector), []
    for t, q in enumerate(query.split(1, 1)):
        memory = memory.append(key[:, t], value[:, t])
        contexts.append(attend(q, memory).context)
        memory = memory if order is None else memory.index_select(order[t])
    return torch.cat(contexts, 1)


def by_cat(step):
    def run(query, key, value, score_vector, order=None):
        keys, values, contexts = key[:, :0], value[:, :0], []
        for t, q in enumerate(query.split(1, 1)):
            keys = torch.cat([keys, key[:, t : t + 1]], 1)
            values = torch.cat([values, value[:, t : t + 1]], 1)
            contexts.append(step(q, keys, values, score_vector))
            if order is not None:
                keys, values = (x.index_select(0, order[t]) for x in (keys, values))
        return torch.cat(contexts, 1)

    return run


def prepare_again(query, key, value, score_vector):
    return attend(query, prepare(key, value, score_vector)).context


def eager(query, key, value, score_vector):
    if score_vector is None:
        score = query @ key.mT
    else:
        score = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ score_vector
    return score.softmax(-1) @ value


def at_once(query, key, value, score_vector, order=None):
    span = Span(causal=True)
    if score_vector is None:
        return dot_attention(query, key, value, scale=1.0, span=span).context
    return additive_attention(query, key, value, score_vector, span=span).context


WAYS = {
    "growing": growing,
    "prepared again": by_cat(prepare_again),
    "eager": by_cat(eager),
    "at once": at_once,
}


def inputs(score, B, kind):
    args = [torch.randn(B, STEPS[kind], 64) for _ in range(3)]
    args.append(torch.randn(64) / 8 if score == "tanh" else None)
    for x in args:
        if kind == "training" and x is not None:
            x.requires_grad_()
    order = torch.randint(0, B, (STEPS[kind], B)) if kind == "reordered" else None
    return args, order


def run(way, args, order):
    leaves = [x for x in args if x is not None and x.requires_grad]
    with torch.set_grad_enabled(bool(leaves)):
        out = way(*args, order)
        return torch.autograd.grad(out.sum(), leaves) if leaves else out


def seconds(*call):
    start = time.process_time()
    run(*call)
    return time.process_time() - start


def row(score, B, kind):
    args, order = inputs(score, B, kind)
    ways = [name for name in WAYS if order is None or name != "at once"]
    rounds = [[seconds(WAYS[x], args, order) for x in ways] for _ in range(ROUNDS + 1)][1:]
    own, *others = (statistics.median(x) for x in zip(*rounds))
    cells = [f"{1e6 * own / STEPS[kind]:.0f} µs", *(f"{x / own:.2f}×" for x in others)]
    if kind == "training":
        peaks = (peak_memory(lambda way=WAYS[x]: run(way, args, order)) for x in ways)
        cells = [f"{x}, {peak / 2**20:.0f} MiB" for x, peak in zip(cells, peaks)]
    return f"| {score}, {kind}, batch {B} | {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"| | {' | '.join(WAYS)} |")
    for score in ("tanh", "dot"):
        for kind in STEPS:
            for B in (1, 16):
                print(row(score, B, kind), flush=True)
