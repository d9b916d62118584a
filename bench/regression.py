"""Compares this checkout's speed with that of the commit whose figures docs/speed.md has.

    python bench/regression.py [COMMIT]

Both are timed in turns, each in its own process. The earlier commit's library is in
build/regression: built for this processor, or copied if its sources are the same. Times are CPU
times on one thread, which other programs hardly affect. Exits with 1 if an operation takes more
than 1.15 times as long as before in three comparisons, each of the least of nine measurements in
new processes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT, ATTEMPTS, ROUNDS, SECONDS = 1.15, 3, 9, 0.02


def make_operations() -> dict[str, Callable[[], object]]:
    """Return calls of public functions, by name."""
    import torch

    import attnfast
    from attnfast import nn

    torch.manual_seed(0)
    torch.empty(31 << 20, dtype=torch.uint8)  # as in compare.py

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    def train(function: Callable, *leaves: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves).float().sum(), leaves)

    def layer(cls: type, dtype: torch.dtype = torch.float32, **options) -> Callable[[], object]:
        module = cls(64, 128, 128, nn.BahdanauAttention(128, 128, 128), **options).to(dtype)
        x, source = leaf(16, 20, 64, dtype=dtype), leaf(16, 20, 128, dtype=dtype)
        return train(lambda x, source: module(x, module.prepare(source)).output, x, source)

    long = leaf(16, 40, 128), leaf(16, 40, 128), leaf(16, 40, 128)
    tiny = torch.randn(1, 1, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8), torch.randn(8)
    memory = attnfast.prepare(torch.randn(32, 50, 256), torch.randn(32, 50, 256), torch.randn(256))
    query = torch.randn(32, 1, 256)
    words = torch.randint(2000, (8, 30))
    return {
        "additive, forward + backward": train(
            lambda *x: attnfast.additive_attention(*x).context, *long, leaf(128)
        ),
        "dot, forward + backward": train(lambda *x: attnfast.dot_attention(*x).context, *long),
        "coverage, forward + backward": train(
            lambda *x: attnfast.coverage_attention(*x, penalty=1.0).context, *long, leaf(128)
        ),
        "copying, forward + backward": train(
            lambda logits, weights: attnfast.copy_distribution(
                logits, weights.softmax(-1), words, torch.zeros(8, 10), num_oov=0
            ),
            leaf(8, 10, 2000),
            leaf(8, 10, 30),
        ),
        "a decoder's step": lambda: attnfast.attend(query, memory),
        "a small call": lambda: attnfast.additive_attention(*tiny),
        "GRU, forward + backward": layer(nn.AttentionGRU),
        "LSTM, input feeding, forward + backward": layer(
            nn.AttentionLSTM, recurrence="input_feeding"
        ),
        "GRU in bfloat16, forward + backward": layer(nn.AttentionGRU, torch.bfloat16),
        **make_searches(),
    }


def make_searches() -> dict[str, Callable[[], object]]:
    """Return calls of searches, by name."""
    import torch

    from attnfast.decoding import beam_search, greedy_search
    from attnfast.models import Config, build

    model = build(Config(1000, "bahdanau", embed_dim=64, hidden_dim=128)).eval()
    source, lengths = torch.randint(4, 1000, (8, 10)), torch.full((8,), 10)
    return {
        "a beam of 5, 8 sentences": lambda: beam_search(model, source, lengths, 5),
        "greedy, one sentence": lambda: greedy_search(model, source[:1], lengths[:1]),
    }


def serve_timings() -> None:
    """Read names of operations from stdin, one per line, and print the seconds of each."""
    warnings.filterwarnings("error", message="attnfast runs on its reference implementation")
    operations = make_operations()
    print(*operations, sep="\t", flush=True)
    for line in sys.stdin:
        call = operations[line.strip()]
        begin, count, taken = time.process_time(), 0, 0.0
        while taken < SECONDS:
            call()
            count, taken = count + 1, time.process_time() - begin
        print(taken / count, flush=True)


class Worker:
    """A process that times a tree's operations.

    Attributes:
        operations: their names.
    """

    def __init__(self, tree: Path):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], text=True, env=environment, cwd=tree,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.operations = self._read().split("\t")

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the operations fail in {self.process.args}: see above")
        return line.rstrip("\n")

    def seconds(self, operation: str) -> float:
        """Return the seconds of one call, a mean."""
        assert self.process.stdin is not None
        print(operation, file=self.process.stdin, flush=True)
        return float(self._read())


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)


def make_tree(commit: str) -> Path:
    """Return a folder with the commit's package and its CPU library."""
    tree = ROOT / "build" / "regression" / commit
    library = tree / "attnfast" / "_C_cpu.so"
    if library.exists():
        return tree
    tree.mkdir(parents=True, exist_ok=True)
    files = git("archive", commit)
    files.check_returncode()
    subprocess.run(["tar", "-x"], cwd=tree, input=files.stdout, check=True)
    if not git("diff", "--quiet", commit, "--", "csrc", "setup.py").returncode:
        shutil.copy(ROOT / "attnfast" / "_C_cpu.so", library)
        return tree
    # At earlier commits a library for another instruction set alone does not load.
    isa = "avx512" if "avx512vl" in Path("/proc/cpuinfo").read_text() else ""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True,
        env={**os.environ, "ATTNFAST_BUILD_CUDA": "0", "ATTNFAST_BUILD_ISA": isa},
    )  # fmt: skip
    return tree


def ratios(now: Worker, before: Worker, operations: list[str]) -> Iterator[tuple[str, float]]:
    """Yield how many times as long as before each operation takes."""
    for operation in operations:
        times = [(now.seconds(operation), before.seconds(operation)) for _ in range(ROUNDS + 1)]
        ours, theirs = (min(x[1:]) for x in zip(*times))
        yield operation, ours / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="by default that of docs/speed.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve_timings()
    page = (ROOT / "docs" / "speed.md").read_text()
    commit = args.commit or re.search(r"[Cc]ommit\s+([0-9a-f]{7,40})\b", page)[1]
    if git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        print(f"commit {commit} is not in this clone: nothing to compare with")
        return None
    tree, slower = make_tree(commit), None
    for _ in range(ATTEMPTS):  # in new processes: where one's memory lies makes a difference
        now, before = Worker(ROOT), Worker(tree)
        both = [x for x in now.operations if x in before.operations]
        found = dict(ratios(now, before, both if slower is None else slower))
        now.process.kill()
        before.process.kill()
        for operation, ratio in found.items():
            print(f"{operation}: {ratio:.2f} of the time at {commit}")
        slower = [x for x, ratio in found.items() if ratio > LIMIT]
        if not slower:
            return None
    raise SystemExit(f"more than {LIMIT} times as slow as at {commit}: {', '.join(slower)}")


if __name__ == "__main__":
    main()
