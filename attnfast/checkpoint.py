"""Checkpoints: written whole or not at all, read without running code."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attnfast.data import Tokenizer, load_tokenizer
from attnfast.errors import InputError, reason
from attnfast.models import Config, Seq2Seq, build


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside its place and then move it there: what was there survives a failure.

    Raises:
        InputError: the folder cannot be written to, or the disk is full.
    """
    temporary = None
    path = path.resolve()  # a link stays one
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has nothing to lose
            path.write_bytes(content)
            return
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
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


def save(path: Path, config: Config, model: Seq2Seq, tokenizer: Tokenizer, **state: Any) -> None:
    """Write a checkpoint: the model, all that is needed to use it, and the state of its training.

    Args:
        state: tensors, numbers, strings, and dictionaries and lists of them.
    """
    content = io.BytesIO()
    proto = torch.frombuffer(bytearray(tokenizer.content()), dtype=torch.uint8)
    torch.save(
        {
            "format": 1,
            "config": asdict(config),
            "model": model.state_dict(),
            "tokenizer": {"kind": tokenizer.kind, "content": proto},
            **state,
        },
        content,
    )
    write_atomically(path, content.getvalue())


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint's dictionary onto the CPU.

    Raises:
        InputError: there is no such file, it is truncated, or it is something else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read checkpoint {path}: {reason(error)}") from error
    except Exception as error:  # damaged bytes fail anywhere in the unpickler
        raise InputError(
            f"{path}: expected a checkpoint, got a truncated or foreign file"
        ) from error
    if not isinstance(state, dict) or state.get("format") != 1:
        raise InputError(f"{path}: expected a checkpoint of attnfast, got a file of something else")
    return state


def restore(state: dict[str, Any], backend: str | None = None) -> tuple[Config, Seq2Seq, Tokenizer]:
    """Make the model, in evaluation mode, and the tokenizer of what :func:`load` read.

    Raises:
        InputError: the parts do not fit together: a newer version's, or a damaged file.
    """
    try:
        config = Config(**state["config"])
        model = build(config, backend)
        model.load_state_dict(state["model"])
        content = bytes(state["tokenizer"]["content"].numpy())
        tokenizer = load_tokenizer(state["tokenizer"]["kind"], content)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"expected a checkpoint of this version, got parts that do not fit: {detail}"
        ) from error
    return config, model.eval(), tokenizer
