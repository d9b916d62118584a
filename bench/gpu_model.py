"""Model the loops of the CUDA kernels from their machine code for sm_90; needs no GPU.

    make .venv/cuda ARCHS=9.0
    python bench/gpu_model.py > bench/results/gpu-model.md

The clocks are those of ``clocks`` in tests/machine_code.py, in which a load takes 270. Times assume
the loops that stage inputs and add them, and nothing else, on 132 multiprocessors at 1.98 GHz (an
H100 or H200).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from machine_code import (  # noqa: E402
    Instruction,
    additive_loop,
    clocks,
    functions,
    plain,
    resources,
    run_tool,
    scheduled_loops,
)

import attnfast  # noqa: E402

MULTIPROCESSORS, GIGAHERTZ = 132, 1.98
LANES, SCHEDULERS, WARPS = 32, 4, 4  # warps of a block: each scheduler has one of them
REGISTERS = 65_536


class Kernel(NamedTuple):
    """A kernel of the additive score in float32, and how it divides its work.

    Attributes:
        name: as c++filt prints it, without namespaces.
        what: what it computes.
        rows: the rows of a block.
        columns: the columns that a block takes at a time.
        by_keys: whether the rows are keys, and the columns queries.
        slice: the features of a block, or None if it takes all.
        most_parts: the most blocks that divide the columns of a block.
        staged: elements of a lane that the inner loop adds between two times of staging, or None
            where spans take branches that the model cannot leave out.
        measured: microseconds at ``SHAPES`` on an H100 at commit 6bc7e8f, or none.
    """

    name: str
    what: str
    rows: int
    columns: int
    by_keys: bool
    slice: int | None
    most_parts: int
    staged: int | None
    measured: tuple[int, ...]


KERNELS = (
    Kernel("products<float, 1, false>", "scores", 16, 32, False, None, 1 << 30, 256, ()),
    Kernel(
        "forward<float, 1, 4>", "scores with contexts", 16, 32, False, None, 1 << 30, 256,
        (32, 107, 71),
    ),
    Kernel(
        "grad_rows<float, 1, false>", "gradients of queries", 32, 32, False, 64, 8, None,
        (31, 87, 141),
    ),
    Kernel(
        "grad_rows<float, 1, true>", "gradients of keys", 32, 32, True, 64, 8, None, (19, 55, 115)
    ),
)  # fmt: skip
#: B, Tq, Tk, A.
SHAPES = {"S1": (32, 50, 50, 512), "S2": (16, 100, 400, 256), "S3": (1, 1000, 1000, 128)}


HEADING = """# Model of the CUDA kernels on sm_90

- the additive score in float32, whole targets; commit {commit}
- instructions, and clocks of a scheduler, of the inner loop for each (query, key, feature) of a
  lane, with one warp and with as many as fit; half a special function alone takes 4 clocks
- clocks with the loop around it, which stages what it adds, if that has no branches for spans;
  copies under way take no clocks
- elements of all lanes per second, and times of these loops alone, with staging if it is given
- in brackets times measured on an H100 at commit 6bc7e8f, of whole kernels: with the softmax, and
  with contexts if there are any; no clusters divided the sums of gradients then, so at S3 they
  cannot be compared
"""


def with_staging(
    found: list[list[Instruction]], inner: list[Instruction], times: int
) -> list[Instruction]:
    """Return the loop around an inner loop that runs `times` times, without its other loops."""

    def find(loop: list[Instruction], part: list[Instruction]) -> int:  # as str.find
        starts = range(len(loop) - len(part) + 1)
        return next((i for i in starts if loop[i : i + len(part)] == part), -1)

    loop = min((x for x in found if len(x) > len(inner) and find(x, inner) >= 0), key=len)
    for other in sorted(found, key=len, reverse=True):
        start = find(loop, other)
        if start >= 0 and find(other, inner) < 0:
            loop = loop[:start] + loop[start + len(other) :]
    start = find(loop, inner)
    return loop[:start] + inner * times + loop[start + len(inner) :]


def tiles(n: int, size: int) -> int:
    return -(-n // size)


def parts_of_blocks(blocks: int, places: int, most: int) -> int:
    """Return the number of parts of csrc/cuda/attention.cuh."""
    best, waves = 1, tiles(blocks, places)
    for count in range(2, min(most, 2 * places // max(blocks, 1)) + 1):
        if (now := tiles(blocks * count, places) / count) < 0.9 * waves:
            best, waves = count, now
    return best


def microseconds(kernel: Kernel, shape: tuple[int, ...], resident: int, per_element) -> float:
    """Return the time of the loops on the multiprocessor with the most blocks."""
    B, Tq, Tk, A = shape
    rows, columns = (Tk, Tq) if kernel.by_keys else (Tq, Tk)
    blocks = B * tiles(rows, kernel.rows) * (tiles(A, kernel.slice) if kernel.slice else 1)
    most = min(tiles(columns, kernel.columns), kernel.most_parts)
    parts = parts_of_blocks(blocks, MULTIPROCESSORS * resident, most)
    features = kernel.slice or tiles(A, 64) * 64
    of_part = tiles(tiles(columns, kernel.columns), parts) * kernel.columns
    elements = kernel.rows * min(of_part, columns) * features / LANES / WARPS
    left, spent = tiles(blocks * parts, MULTIPROCESSORS), 0.0
    while left > 0:
        at_once = min(left, resident)
        spent += at_once * elements * per_element[at_once]
        left -= at_once
    return spent / GIGAHERTZ / 1e3


def main() -> None:
    library = Path(attnfast.__file__).with_name("_C_cuda.so")
    advice = "_C_cuda.so has no machine code for sm_90: make .venv/cuda ARCHS=9.0"
    if not library.exists():
        sys.exit(advice)
    with tempfile.TemporaryDirectory() as folder:
        run_tool("cuobjdump", library, "-xelf", "all", cwd=Path(folder))
        cubins = [*Path(folder).glob("*.sm_90.cubin")]
        if not cubins:
            sys.exit(advice)
        code = {plain(k): v for x in cubins for k, v in functions(x, "-hex").items()}
        used = {plain(k): v["REG"] for x in cubins for k, v in resources(x)}
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "csrc"], cwd=ROOT, text=True, capture_output=True
    ).stdout.strip()
    print(HEADING.format(commit=commit))
    columns = [
        "kernel", "registers", "instructions", "clocks, one warp", "clocks", "with staging",
        "per second",
    ]  # fmt: skip
    print("| " + " | ".join([*columns, *(f"{name}, µs" for name in SHAPES)]) + " |")
    print("|---|" + "--:|" * (len(columns) - 1 + len(SHAPES)))
    for kernel in KERNELS:
        found = scheduled_loops(code[kernel.name])
        elements, loop = additive_loop(found)
        resident = REGISTERS // (tiles(used[kernel.name], 8) * 8 * LANES * WARPS)
        whole, count = loop, elements
        if kernel.staged:
            whole, count = with_staging(found, loop, kernel.staged // elements), kernel.staged
        per_element = {n: clocks(whole, n) / count for n in range(1, resident + 1)}
        rate = MULTIPROCESSORS * GIGAHERTZ * 1e9 * SCHEDULERS * LANES / per_element[resident]
        predicted = [microseconds(kernel, x, resident, per_element) for x in SHAPES.values()]
        cells = [
            f"{kernel.what}, {resident} blocks each", str(used[kernel.name]),
            f"{len(loop) / elements:.1f}", f"{clocks(loop, 1) / elements:.1f}",
            f"{clocks(loop, resident) / elements:.1f}",
            f"{per_element[resident]:.1f}" if kernel.staged else "",
            f"{rate:.1e}",
            *(f"{x:.0f}" + (f" ({kernel.measured[i]})" if kernel.measured else "")
              for i, x in enumerate(predicted)),
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
