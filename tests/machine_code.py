"""What machine code for NVIDIA GPUs is made of, read with the tools that come with Triton."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

#: float32 instructions; those with a 2, of sm_100, do two operations.
FLOAT32 = ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2")


def run_tool(name: str, file: Path, *flags: str, cwd: Path | None = None) -> str:
    """Run cuobjdump or nvdisasm."""
    from triton import knobs

    command = [getattr(knobs.nvidia, name).path, *flags, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


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


def functions(cubin: Path) -> dict[str, list[dict]]:
    """Count the loops of every function, by its mangled name."""
    parts = re.split(r"\n//-+ \.text\.(\S+)", run_tool("nvdisasm", cubin, "-c"))
    return {name: loops(sass) for name, sass in zip(parts[1::2], parts[2::2])}


def factored_loop(loops: list[dict]) -> tuple[int, tuple[float, ...]]:
    """Find the loop that takes reciprocals and no exponential, one for two elements.

    Return how many elements it takes, and for each of them special functions, float32 instructions
    and all.
    """
    loop = min((x for x in loops if x["special"] == x["reciprocals"] > 0), key=lambda x: x["all"])
    elements = 2 * loop["reciprocals"]
    return elements, tuple(loop[x] / elements for x in ("special", "float32", "all"))
