"""Turns the JSON of a benchmark run into a report and a chart for each file of benchmarks.

    python bench/report.py bench.json --out bench/results/NAME

writes NAME-attention.md, NAME-attention.png and so on, and prints the table of docs/speed.md.
Ratios are medians of interleaved rounds of one process.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

#: What eager code is called in a report, by the project whose code it is.
EAGER = ("eager", "as it was", "eager, 32 best", "espnet", "joeynmt")


def rows(report: dict) -> list[dict]:
    """Return one row a benchmark: what was timed, its median in seconds, peers and memory.

    That of an interrupted run has nothing of the last.
    """
    done = [b for b in report["benchmarks"] if "score" in b["extra_info"]]
    return [{"median": b["stats"]["median"], **b["extra_info"]} for b in done]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def size(memory: float) -> str:
    return f"{memory / 2**20:.3g} MiB" if memory >= 2**20 else f"{memory / 2**10:.3g} KiB"


def times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 2 else f"{ratio:.1f}×"


def markdown(report: dict) -> str:
    """Return the report: the machine, then a table for each score and direction."""
    table = rows(report)
    cpu, first = report["machine_info"]["cpu"], table[0]
    commit = report["commit_info"]
    text = [
        "# Attention benchmark\n",
        f"- processor: {cpu.get('brand_raw', 'unknown')}, {first['threads']} threads; "
        f"device: {first['device']}",
        f"- Python {report['machine_info']['python_version']}, "
        + ", ".join(f"{k} {v}" for k, v in first["versions"].items()),
        f"- commit {commit['id']}{' with local changes' if commit['dirty'] else ''}",
        f"- {report['datetime'][:10]}",
        "- medians of interleaved rounds; × is the peer's time over attnfast's",
        *[
            "- seconds of the device, and of the host where launches take longer than 0.3 ms; "
            "the cache is cleared before each call"
        ]
        * (first["device"] != "cpu"),
        *[
            f"- left out: {peer} at {r['shape']}, {r['direction']}, {r['score']}: {why}"
            for r in table
            for peer, why in r.get("left_out", {}).items()
        ],
        "- peak memory is the most that one call has allocated at any time, inputs left out\n",
    ]
    text += markdown_of_keys([r for r in table if "keys" in r])
    table = [r for r in table if "keys" not in r]
    for group in dict.fromkeys((r["score"], r["direction"]) for r in table):
        members = [r for r in table if (r["score"], r["direction"]) == group]
        peers = list(dict.fromkeys(peer for r in members for peer in r["peers"]))
        text.append(f"## {group[0]}, {group[1]}\n")
        other = "eager" if "eager" in peers else peers[0]
        kept = "kept" in members[0]
        sizes = members[0].get("size_names", "B, Tq, Tk, A, Dv")
        head = ["shape", sizes, members[0]["ours"], *peers, "peak memory", other]
        head += ["kept for the backward", other] * kept
        bounds = all(r.get("bound") for r in members)
        head += ["of the roofline"] * bounds
        text.append("| " + " | ".join(head) + " |")
        text.append("|---|---|" + "--:|" * (len(head) - 2))
        for r in members:
            of = r["peers"]
            ratios = [times(of[p] / r["median"]) if p in of else "" for p in peers]
            memory = [size(r["memory"][x]) if x in r["memory"] else "" for x in (r["ours"], other)]
            sizes = ", ".join(map(str, r["sizes"]))
            cells = [r["shape"], sizes, milliseconds(r["median"]), *ratios, *memory]
            cells += [size(r["kept"][name]) for name in (r["ours"], other) if kept]
            cells += [f"{100 * r['bound'] / r['median']:.0f} %"] if bounds else []
            text.append("| " + " | ".join(cells) + " |")
        by_peer = ([r["peers"][p] / r["median"] for r in members if p in r["peers"]] for p in peers)
        ratios = [statistics.geometric_mean(x) for x in by_peer]
        text.append("| geometric mean | | | " + " | ".join(map(times, ratios)) + " | | |")
        text.append("")
    return "\n".join(text)


def markdown_of_keys(table: list[dict]) -> list[str]:
    """Return a table of what contenders that see fewer or more keys take, for every length."""
    text = []
    for group in dict.fromkeys((r["score"], r["direction"]) for r in table):
        text.append(f"## {group[0]}, {group[1]}\n")
        text.append(
            "*gain* is the dense fused call's time over the contender's; *share*, that gain over "
            "the ratio of the keys seen.\n"
        )
        text.append("| length | contender | keys a row | time | gain | share | peak memory |")
        text.append("|---|---|--:|--:|--:|--:|--:|")
        for r in [r for r in table if (r["score"], r["direction"]) == group]:
            seconds = {r["ours"]: r["median"], **r["peers"]}
            base = next((x for x in ("dense", "full") if x in seconds), None)
            for name, taken in seconds.items():
                gain = share = ""
                if base:
                    ratio = seconds[base] / taken
                    of_keys = ratio * r["keys"][name] / r["keys"][base]
                    gain, share = times(ratio), f"{of_keys:.2f}"
                cells = [r["shape"], name, str(r["keys"][name]), milliseconds(taken), gain, share]
                text.append("| " + " | ".join([*cells, size(r["memory"][name])]) + " |")
        text.append("")
    return text


def chart_of_keys(report: dict, path: Path) -> None:
    """Draw the time of every contender over the length."""
    from matplotlib import pyplot as plt

    table = rows(report)
    groups = list(dict.fromkeys((r["score"], r["direction"]) for r in table))
    lengths = {g: {r["shape"] for r in table if (r["score"], r["direction"]) == g} for g in groups}
    groups = [g for g in groups if len(lengths[g]) > 1] or groups
    figure, grid = plt.subplots(
        (len(groups) + 1) // 2, 2, figsize=(10.8, 3.8 * ((len(groups) + 1) // 2)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for group, axis in zip(groups, grid.flat):
        lines: dict[str, list[tuple[int, float]]] = {}
        for r in [r for r in table if (r["score"], r["direction"]) == group]:
            for name, taken in {r["ours"]: r["median"], **r["peers"]}.items():
                lines.setdefault(name, []).append((r["sizes"][1], taken * 1e3))
        for name, points in lines.items():
            ours = name.startswith(("window", "stride", "dense"))
            axis.loglog(*zip(*points), "o-" if ours else "s--", label=name, markersize=4)
        axis.set_title(", ".join(group), fontsize=10)
        axis.set_xlabel("queries and keys")
        axis.set_ylabel("ms")
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def chart(report: dict, path: Path) -> None:
    """Draw how many times faster attnfast is than each peer, by shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    table = rows(report)
    if all("keys" in r for r in table):
        return chart_of_keys(report, path)
    table = [r for r in table if "keys" not in r]
    scores = list(dict.fromkeys(r["score"] for r in table))
    directions = list(dict.fromkeys(r["direction"] for r in table))
    lines = max(len({r["shape"] for r in table if r["score"] == score}) for score in scores)
    figure, grid = plt.subplots(
        len(scores),
        len(directions),
        figsize=(5.4 * len(directions), (1.2 + 0.34 * lines) * len(scores)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for score, line in zip(scores, grid):
        for direction, axis in zip(directions, line):
            members = [r for r in table if (r["score"], r["direction"]) == (score, direction)]
            peers = list(dict.fromkeys(p for r in members for p in r["peers"]))
            for i, peer in enumerate(peers):
                heights = [r["peers"].get(peer, float("nan")) / r["median"] for r in members]
                y = [j + (i - (len(peers) - 1) / 2) * 0.8 / len(peers) for j in range(len(members))]
                axis.barh(y, heights, 0.8 / len(peers), label=peer)
            axis.axvline(1, color="black", linewidth=1)
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
            axis.set_yticks(range(len(members)), [r["shape"] for r in members])
            axis.set_title(f"{score}, {direction}", fontsize=10)
            axis.set_xlabel("times slower than attnfast")
            axis.legend(fontsize=8, frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].invert_yaxis()  # shared by the row
    figure.savefig(path, dpi=150)


def by_file(report: dict) -> dict[str, dict]:
    """Return the reports of a run by the name of their file: "attention" of test_attention.py."""
    parts: dict[str, list] = {}
    for x in report["benchmarks"]:
        parts.setdefault(re.search(r"test_(\w+)\.py", x["fullname"])[1], []).append(x)
    return {name: {**report, "benchmarks": found} for name, found in parts.items()}


def ratios_of(report: str) -> dict[str, dict[str, list[str]]]:
    """Return the ratios of each table of a report by its title and peer, the mean last."""
    found = {}
    for title, table in re.findall(r"(?m)^## (.+)\n\n(\| shape .*\n(?:\|.*\n)+)", report):
        head, _, *lines = ([x.strip() for x in y[1:].split("|")] for y in table.splitlines())
        columns = ((name, [x[i] for x in lines if x[i:]]) for i, name in enumerate(head))
        found[title] = {}
        for name, cells in columns:  # the first of two that are alike has the ratios
            if cells[-1].endswith("×"):
                found[title].setdefault(name, [x for x in cells if x])
    return found


def summary(reports: list[Path], folder: str = "../bench/results") -> str:
    """Return the table of all reports: best, mean and worst ratio of eager and compiled code."""
    lines = [
        "| report | | shapes | eager: best | mean | worst | torch.compile: best | mean | worst |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for path in reports:
        link = f"[{path.stem.rpartition('-')[2]}]({folder}/{path.name})"
        for title, peers in ratios_of(path.read_text()).items():
            eager = next((peers[x] for x in EAGER if x in peers), None)
            if eager is None:
                continue
            cells = [link, title, str(len(eager) - 1)]
            for column in (eager, peers.get("torch.compile")):
                *each, mean = column or [""]
                each = sorted(each, key=lambda x: float(x[:-1])) or [""]
                cells += [each[-1], mean, each[0]]
            lines.append("".join(f"| {x} " if x else "| " for x in cells) + "|")
            link = ""
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="written by pytest --benchmark-json")
    parser.add_argument("--out", type=Path, default=Path("bench/results/report"))
    args = parser.parse_args()
    try:
        parts = by_file(json.loads(args.json.read_text()))
        texts = {name: markdown(report) for name, report in parts.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise SystemExit(
            f"{args.json}: expected the JSON of a benchmark run, got {error!r}"
        ) from None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        paths.append(args.out.with_name(f"{args.out.name}-{name}.md"))
        paths[-1].write_text(text)
        chart(parts[name], paths[-1].with_suffix(".png"))
    print(summary(paths))


if __name__ == "__main__":
    main()
