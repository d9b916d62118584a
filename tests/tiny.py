"""Tiny data of the kind that the examples read."""

import csv
import itertools
import wave

import torch


def write_recordings(folder):
    """Write recordings of one speaker, one of each digit and part."""
    folder.mkdir()
    for digit in range(10):
        for index in (0, 5, 10):
            time = torch.arange(500 + 90 * digit + index) / 8000
            samples = (2**13 * torch.sin(2 * torch.pi * 150 * (digit + 2) * time)).short()
            with wave.open(str(folder / f"{digit}_me_{index}.wav"), "wb") as out:
                out.setparams((1, 2, 8000, 0, "NONE", ""))
                out.writeframes(samples.numpy().tobytes())
    return folder


NAMES = ("Alpha", "Beta Bar", "Gamma", "Delta")
FOODS = ("French", "Thai", "Greek", "Indian")
AREAS = ("city centre", "riverside")


def write_descriptions(folder):
    """Write three descriptions of each of some places, in files of the E2E challenge's form."""
    folder.mkdir()
    for file, names in (("devset.csv", NAMES[:3]), ("testset_w_refs.csv", NAMES[2:])):
        with (folder / file).open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["mr", "ref"])
            for name, food, area in itertools.product(names, FOODS, AREAS):
                attributes = f"name[{name}], food[{food}], area[{area}]"
                rows.writerow([attributes, f"{name} serves {food} food in the {area}."])
                rows.writerow([attributes, f"In the {area}, {name} has {food} food."])
                rows.writerow([attributes, f"{name}: {food}, {area}, {area}, {food}."])
    return folder
