"""Files that are there whole or not at all."""

import contextlib
import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTS = ".*.part"  # what a process that was killed while it wrote leaves behind


class Unwritten(OSError):
    """A file that could not be written; the one before it, if there was one, is still there."""


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether the folder is this process's own for a while; the lock goes with the process, however it ends.

    Where the system has no locks, it is.
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # some network file systems
            pass
        yield True
    finally:
        os.close(handle)


def remove_parts(folder: Path) -> None:
    """Clear away what a killed process has left of a file that it was writing."""
    for part in folder.glob(PARTS):
        with contextlib.suppress(OSError):
            part.unlink()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A path to write to, in the same folder; it takes the place of `path` when the block ends well."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
        _to_disk(path.parent)
    except OSError as error:
        raise Unwritten(
            error.errno,
            f"{path} could not be written ({error.strerror or error}) and is as it was before. Make room or "
            "give leave to write there",
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _to_disk(folder: Path) -> None:
    """The new name of a file, which a power cut may otherwise take back."""
    with contextlib.suppress(OSError):  # some systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    with atomic(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as part:
        part.write_text(text)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All `rows`, with the columns of the first."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_text(path, text.getvalue())
