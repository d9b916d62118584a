"""What machine code for NVIDIA GPUs is made of, read with the tools that come with Triton."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

#: float32 instructions; those with a 2, of sm_100, do two operations.
FLOAT32 = ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2")


def run_tool(name: str, file: Path, *flags: str, cwd: Path | None = None) -> str:
    """Run cuobjdump or nvdisasm."""
    from triton import knobs

    command = [getattr(knobs.nvidia, name).path, *flags, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


class Instruction(NamedTuple):
    """An instruction of sm_70 or later, and the barriers by which it is scheduled.

    Attributes:
        code: such as ``LDG.E.128``.
        waits: the numbers of the barriers that it waits for.
        sets: the barrier that is set until its result is there, or None.
    """

    code: str
    waits: frozenset[int]
    sets: int | None


def scheduled_loops(sass: str) -> list[list[Instruction]]:
    """Return the instructions of every loop of a function that nvdisasm printed with -hex."""
    instructions, labels, jumps = [], {}, []
    code = ""
    for line in sass.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(
            r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);\s+/\* 0x\w+ \*/", line
        ):
            code = found[1]
            jump = re.search(r"`\(\.(L_x_\d+)\)", found[2]) if code.startswith("BRA") else None
            if jump and jump[1] in labels:  # backwards: the end of a loop
                jumps.append((labels[jump[1]], len(instructions)))
        elif code and (word := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*$", line)):
            control = int(word[1], 16)
            mask, number = control >> 52 & 63, control >> 46 & 7
            waits = frozenset(i for i in range(6) if mask >> i & 1)
            instructions.append(Instruction(code, waits, number if number < 6 else None))
            code = ""
    return [instructions[first : last + 1] for first, last in jumps]


def load_rounds(loop: list[Instruction]) -> tuple[int, int]:
    """Return how many global loads a loop has, and in how many rounds.

    A round ends where an instruction waits for one of its loads: those of the next one begin later
    by all the latency of memory.
    """
    pending, is_open, loads, rounds = set(), False, 0, 0
    for is_counted in (False, True):  # from the second time on all is as it stays
        for x in loop:
            if x.waits & pending:
                pending -= x.waits
                is_open = False
            if x.code.startswith("LDG"):
                loads += is_counted
                rounds += is_counted and not is_open
                is_open = True
                if x.sets is not None:
                    pending.add(x.sets)
    return loads, rounds


def loops(sass: str) -> list[dict]:
    """Count the instructions of every loop of a function."""
    lines, labels, found = sass.splitlines(), {}, []
    for i, line in enumerate(lines):
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = i
        jump = re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)
        if jump and jump[1] in labels:  # backwards: the body of a loop
            body = "\n".join(lines[labels[jump[1]] : i + 1])
            codes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", body)
            count = Counter(code.split(".")[0] for code in codes)
            found.append(
                {
                    "reciprocals": codes.count("MUFU.RCP"),
                    "special": count["MUFU"],
                    "float32": sum(count[x] for x in FLOAT32),
                    "all": len(codes),
                }
            )
    return found


def machine_code(cubin: bytes) -> dict:
    """Registers, spills and loops of the only function."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ((_, usage),) = resources(Path(file.name))
        sass = run_tool("nvdisasm", Path(file.name), "-c")
    spills = usage["STACK"] + usage["LOCAL"]
    return {"registers": usage["REG"], "spills": spills, "loops": loops(sass)}


def resources(cubin: Path) -> list[tuple[str, dict[str, int]]]:
    """Return every function's mangled name and what it uses: REG, STACK, SHARED, LOCAL."""
    usage = run_tool("cuobjdump", cubin, "-res-usage")
    return [
        (name, {k: int(n) for k, n in re.findall(r"([A-Z]+):(\d+)", line)})
        for name, line in re.findall(r"Function (\S+):\s*\n\s*(.+)", usage)
    ]


def functions(cubin: Path, *flags: str) -> dict[str, str]:
    """Return the instructions of every function, by its mangled name."""
    parts = re.split(r"\n//-+ \.text\.(\S+)", run_tool("nvdisasm", cubin, "-c", *flags))
    return dict(zip(parts[1::2], parts[2::2]))


def factored_loop(loops: list[dict]) -> tuple[int, tuple[float, ...]]:
    """Find the loop that takes reciprocals and no exponential, one for two elements.

    Return how many elements it takes, and for each of them special functions, float32 instructions
    and all.
    """
    loop = min((x for x in loops if x["special"] == x["reciprocals"] > 0), key=lambda x: x["all"])
    elements = 2 * loop["reciprocals"]
    return elements, tuple(loop[x] / elements for x in ("special", "float32", "all"))
