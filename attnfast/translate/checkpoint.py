"""Checkpoints: they are written atomically, and read without running code.

A checkpoint is a file of ``torch.save``, a zip archive, whose comment at the end is the SHA-256 of
all bytes before it, so that one rename replaces both and ``torch.load`` can read the file.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import torch

from attnfast._utils.checks import InputError, first_line, reason
from attnfast.models import Config, Seq2Seq, build
from attnfast.translate.data import Tokenizer, load_tokenizer

#: The version of the file format.
FORMAT = 5
DIGITS = 2 * hashlib.sha256().digest_size


def make_folder(directory: Path) -> None:
    """Make a folder; raise if no file can be created in it.

    Raises:
        InputError: the path is a file, or the folder cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InputError(f"cannot write to the folder {directory}: {reason(error)}") from error


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Lock a folder for this process, until it leaves the context or exits.

    Raises:
        InputError: another process holds the lock, or the file system has no locks.
    """
    path = directory / ".lock"
    held = filelock.FileLock(path, timeout=0)
    try:
        held.acquire()
    except filelock.Timeout:
        raise InputError(
            f"cannot write to the folder {directory}: another training writes to it"
        ) from None
    except OSError as error:
        raise InputError(f"cannot lock {path}: {reason(error)}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while no other process can hold it
        held.release()


def check_file(path: Path) -> None:
    """Raise if a file cannot be written, before the work whose result it will hold.

    Raises:
        InputError: the path is a folder, or its parent does not exist or cannot be written to.
    """
    path = path.resolve()
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no such folder")
    if path.is_file() or not path.exists():
        make_folder(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it: an existing file survives a failure.

    Temporary files of a killed process are removed.

    Raises:
        InputError: the folder cannot be written to, or the disk is full.
    """
    temporary = None
    path = path.resolve()  # a symbolic link is preserved
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to preserve
            path.write_bytes(content)
            return
        for left in glob.glob(f".{glob.escape(path.name)}.*.part", root_dir=path.parent):
            path.with_name(left).unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False
        ) as file:
            temporary = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _check_finite(model: Seq2Seq, name: str | Path) -> None:
    for parameter, value in model.state_dict().items():
        if not value.isfinite().all():
            raise InputError(
                f"{name}: expected finite parameters, got NaN or infinity: {parameter}"
            )


def save(path: Path, config: Config, model: Seq2Seq, tokenizer: Tokenizer, **state: Any) -> None:
    """Write a checkpoint: model, configuration, tokenizer, and the state of its training.

    Args:
        state: tensors, numbers, strings, and dictionaries and lists of them.

    Raises:
        InputError: a parameter is not finite, or the file cannot be written; an existing file is
            unchanged.
    """
    _check_finite(model, path)
    proto = torch.frombuffer(bytearray(tokenizer.content()), dtype=torch.uint8)
    parts = {
        "format": FORMAT,
        "config": asdict(config),
        "model": model.state_dict(),
        "tokenizer": {"kind": tokenizer.kind, "content": proto},
    }
    write(path, parts | state)


def write(path: Path, state: dict[str, Any]) -> None:
    """Write the dictionary of a checkpoint, such as :func:`load` returns, with its checksum."""
    file = io.BytesIO()
    torch.save(state, file)
    content = file.getvalue()[:-2] + DIGITS.to_bytes(2, "little")  # length of the comment
    write_atomically(path, content + hashlib.sha256(content).hexdigest().encode())


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint's dictionary onto the CPU.

    Raises:
        InputError: the file does not exist, is damaged, or is not a checkpoint.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read checkpoint {path}: {reason(error)}") from error
    foreign = f"{path}: expected a checkpoint as attnfast wrote it, got a damaged or foreign file"
    digest = hashlib.sha256(memoryview(content)[:-DIGITS]).hexdigest().encode()
    if not content.endswith(digest):
        raise InputError(foreign)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    number = state.get("format") if isinstance(state, dict) else None
    if not isinstance(number, int):
        raise InputError(foreign)
    if number != FORMAT:
        raise InputError(
            f"{path}: expected a checkpoint of format {FORMAT}, got {number}, "
            "which another version of attnfast has written"
        )
    return state


def restore(
    state: dict[str, Any], backend: str | None = None, name: str | Path = "checkpoint"
) -> tuple[Config, Seq2Seq, Tokenizer]:
    """Make the model, in evaluation mode, and the tokenizer from a dictionary of :func:`load`.

    Args:
        name: name of the file in error messages.

    Raises:
        InputError: the parts do not fit together, as in another version's file, or a parameter is
            not finite.
    """
    try:
        config = Config(**state["config"])
        model = build(config, backend)
        model.load_state_dict(state["model"])
        kind, content = state["tokenizer"]["kind"], bytes(state["tokenizer"]["content"].tolist())
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{name}: expected a checkpoint of this version, got parts that do not fit: "
            f"{first_line(error)[:60]}"
        ) from error
    _check_finite(model, name)
    return config, model.eval(), load_tokenizer(kind, content)
