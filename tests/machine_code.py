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
    """An instruction of sm_70 or later, and its scheduling fields.

    Attributes:
        code: such as ``LDG.E.128``.
        waits: the numbers of the barriers that it waits for.
        sets: the barrier that is set until its result is there, or None.
        reads: the barrier that is set until its operands have been read, or None.
        stall: the clocks until the warp may issue its next instruction.
    """

    code: str
    waits: frozenset[int]
    sets: int | None
    reads: int | None
    stall: int


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
            waits = frozenset(i for i in range(6) if control >> 52 + i & 1)
            sets, reads = (n if n < 6 else None for n in (control >> 46 & 7, control >> 49 & 7))
            stall = max(control >> 41 & 15, 1)
            instructions.append(Instruction(code, waits, sets, reads, stall))
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


#: Clocks for which an instruction of a warp occupies a unit of its scheduler, and those until its
#: result is there; of sm_90. Loads and stores of all four schedulers share a unit, which takes 128
#: bytes per clock. Others take one clock, and what reads their result waits for the stall.
UNITS = {
    "MUFU": ("special", 8, 20), "F2F": ("special", 8, 20), "F2I": ("special", 8, 20),
    "I2F": ("special", 8, 20), "SHFL": ("memory", 4, 24), "LDS": ("memory", 4, 30),
    "STS": ("memory", 4, 20), "LDG": ("memory", 4, 270), "STG": ("memory", 4, 20),
    "LDC": ("memory", 4, 40), "DFMA": ("float64", 2, 20), "DADD": ("float64", 2, 20),
    "DMUL": ("float64", 2, 20), "HMMA": ("tensor", 8, 30), "S2R": ("other", 1, 25),
    **{x: ("float32", 1, 6) for x in (*FLOAT32, "IMAD")},
    **{x: ("integer", 2, 6) for x in (
        "IADD3", "LOP3", "ISETP", "SHF", "LEA", "SEL", "FMNMX", "FSETP", "FSEL", "PRMT", "VIADD",
        "MOV", "PLOP3", "IABS", "FCHK", "IMNMX", "VIMNMX",
    )},
}  # fmt: skip
QUEUED = {"special": 24}  # clocks of work that may wait for a unit without delaying a warp


def clocks(loop: list[Instruction], warps: int, times: int = 20) -> float:
    """Model the clocks of a scheduler for an iteration of a loop by one of its warps.

    All warps run the loop alone. A clock issues an instruction of the next warp whose stall has
    passed, whose barriers are open and whose unit is free. Branches are not taken, and conflicts of
    banks and misses of the cache for instructions are left out.
    """
    code = loop * times
    at, ready = [0] * warps, [37 * w for w in range(warps)]  # they start at different times
    barriers = [[0] * 6 for _ in range(warps)]
    free: Counter = Counter()
    clock, last = 0, -1

    def earliest(warp: int) -> int:
        x = code[at[warp]]
        unit = UNITS.get(x.code.split(".")[0], ("other", 1, 4))[0]
        opens = max((barriers[warp][i] for i in x.waits), default=0)
        return max(ready[warp], opens, free[unit] - QUEUED.get(unit, 0))

    while running := [w for w in range(warps) if at[w] < len(code)]:
        order = sorted(running, key=lambda w: (max(earliest(w), clock), (w - last - 1) % warps))
        last = order[0]
        clock = max(earliest(last), clock)
        x = code[at[last]]
        unit, occupied, latency = UNITS.get(x.code.split(".")[0], ("other", 1, 4))
        if unit == "memory":
            occupied *= 4 if ".128" in x.code else 2 if ".64" in x.code else 1
        begin = max(free[unit], clock)
        free[unit] = begin + occupied
        done = begin + latency + (occupied if unit == "memory" else 0)
        if x.sets is not None:
            barriers[last][x.sets] = max(barriers[last][x.sets], done)
        if x.reads is not None:
            barriers[last][x.reads] = max(barriers[last][x.reads], clock + 12)
        ready[last] = clock + x.stall
        at[last] += 1
        clock += 1
    return max(*ready, clock) / times / warps


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


def plain(mangled: str) -> str:
    """Return a function's name without namespace and arguments."""
    said = subprocess.run(["c++filt"], input=mangled, text=True, capture_output=True).stdout
    said = re.sub(
        r"attnfast::\(anonymous namespace\)::|\((attnfast::)?(Score|Cell)\)|void ", "", said
    )
    return re.sub(r"(?m)^([\w<>, ]+)\(.*", r"\1", said.strip())


def functions(cubin: Path, *flags: str) -> dict[str, str]:
    """Return the instructions of every function, by its mangled name."""
    parts = re.split(r"\n//-+ \.text\.(\S+)", run_tool("nvdisasm", cubin, "-c", *flags))
    return dict(zip(parts[1::2], parts[2::2]))


def additive_loop(loops: list[list[Instruction]]) -> tuple[int, list[Instruction]]:
    """Find the loop of :func:`factored_loop`; return its number of elements and instructions."""

    def special(loop: list[Instruction]) -> Counter:
        return Counter(x.code for x in loop if x.code.startswith("MUFU"))

    found = [x for x in loops if list(special(x)) == ["MUFU.RCP"]]
    loop = min(found, key=len)
    return 2 * special(loop)["MUFU.RCP"], loop


def factored_loop(loops: list[dict]) -> tuple[int, tuple[float, ...]]:
    """Find the loop that takes reciprocals and no exponential, one for two elements.

    Return how many elements it takes, and for each of them special functions, float32 instructions
    and all.
    """
    loop = min((x for x in loops if x["special"] == x["reciprocals"] > 0), key=lambda x: x["all"])
    elements = 2 * loop["reciprocals"]
    return elements, tuple(loop[x] / elements for x in ("special", "float32", "all"))
