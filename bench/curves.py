"""Draws what additive attention costs over the number of keys and over the number of features.

    python bench/curves.py --out docs

writes curves-keys.png and curves-features.png: time and peak memory of attnfast, eager code and
torch.compile, forward and forward + backward.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attention_cases import Case, attend, inputs
from compare import eager, timed
from tqdm import tqdm

from attnfast._utils.benchmark import best_device, costs
from attnfast.analysis.plots import draw_speed


def calls(case: Case, backward: bool) -> dict:
    """Return one call of each contender on the tensors of the case."""
    args = inputs(case, best_device())
    grad = torch.randn(case.B, case.Tq, case.Dv, device=best_device())
    leaves = [args[name] for name in ("query", "key", "value", "score_vector")]
    torch._dynamo.reset()
    ways = {
        "attnfast": lambda **a: attend(a),
        "eager": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    return {
        name: timed(lambda way=way: way(**args)[0], leaves if backward else None, grad)
        for name, way in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--repeats", type=int, default=5)
    out, repeats = (options := parser.parse_args()).out, options.repeats
    keys, features = (25, 50, 100, 200, 400, 800), (32, 64, 128, 256, 512, 1024)
    sweeps = {
        "keys": (keys, "keys", "B 8, 50 queries, A = Dv = 256", lambda n: (8, 50, n, 256, 256)),
        "features": (
            features,
            "features A",
            "B 8, 50 queries, 100 keys, Dv 256",
            lambda n: (8, 50, 100, n, 256),
        ),
    }
    for name, (sizes, axis, what, shape) in sweeps.items():
        rows = {}
        for title, backward in (("forward", False), ("forward + backward", True)):
            measured = [
                costs(calls(Case("tanh", *shape(n)), backward), repeats)
                for n in tqdm(sizes, desc=f"{name}, {title}", leave=False)
            ]
            rows[title] = {way: [cost[way] for cost in measured] for way in measured[0]}
        path = out / f"curves-{name}.png"
        note = f"additive attention, float32, {what}, {torch.get_num_threads()} threads"
        path.write_bytes(draw_speed(rows, sizes, note, axis))
        print(f"{path} written")


if __name__ == "__main__":
    main()
