"""Headers of safetensors files are outsiders' claims: good ones are read, every other is one clear error."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from delivery.checkpoint.header import MAX_HEADER_BYTES, read_header
from delivery.errors import DataError


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple = (2,), offsets: tuple = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_file_of_the_library_reads_the_same(tmp_path: Path) -> None:
    tensors = {
        "b": torch.ones(3, 2, dtype=torch.bfloat16),
        "a": torch.zeros(5, dtype=torch.int64),
        "e": torch.ones(0),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    infos = read_header(tmp_path / "x.safetensors")
    assert {n: (i.dtype, i.shape, i.size_bytes) for n, i in infos.items()} == {
        "a": ("I64", (5,), 40),
        "b": ("BF16", (3, 2), 12),
        "e": ("F32", (0,), 0),
    }
    assert all(i.shard == "x.safetensors" for i in infos.values())
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert raw[infos["b"].offset :][:12] == b"\x80\x3f" * 6


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "model-00002-of-00003.safetensors",
        {"a": entry(shape=(100,), offsets=(0, 400))},
        b"x" * 300,
    )
    size = path.stat().st_size
    with pytest.raises(DataError, match=r"model-00002-of-00003\.safetensors is truncated") as caught:
        read_header(path)
    assert caught.value.code == "shard-truncated"
    assert caught.value.why == f"its header needs {size + 100} bytes, the file has {size}"


@pytest.mark.parametrize("keep", [0, 5, 8, 30])
def test_a_file_cut_inside_its_header(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry()}, b"x" * 8)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"x\.safetensors is truncated"):
        read_header(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.safetensors does not exist"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"not json", b"", "it is not JSON"),
        (b'{"a": [', b"", "it is not JSON"),
        (b'{"a": 1, "a": 2}', b"", "a name occurs twice"),
        (b"[" * 100_000, b"", "it is not JSON"),
        ([1], b"", "expected an object, got list"),
        ({"a": 1}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": {"dtype": "F32"}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": entry(dtype="F33")}, b"x" * 8, "unknown dtype 'F33'"),
        ({"a": entry(dtype=7)}, b"x" * 8, "unknown dtype 7"),
        ({"a": entry(shape=(-1,))}, b"x" * 8, "not a list of counts"),
        ({"a": entry(shape=(True,))}, b"x" * 8, "not a list of counts"),
        ({"a": entry(shape=(1.0,))}, b"x" * 8, "not a list of counts"),
        ({"a": entry(shape=(1,) * 65)}, b"x" * 4, "not a list of counts"),
        ({"a": entry(shape=(3,))}, b"x" * 8, "needs 12 bytes, its offsets give 8"),
        ({"a": entry(shape=(2**31, 2**31))}, b"x" * 8, "its offsets give 8"),
        ({"a": entry(offsets=(8, 0))}, b"x" * 8, "its offsets give -8"),
        ({"a": entry(offsets=(0, 8, 9))}, b"x" * 8, "are not two counts"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"x" * 12, "overlaps the one before"),
        ({"a": entry(offsets=(4, 12))}, b"x" * 12, "leaves a gap before it"),
        ({"a": entry()}, b"x" * 9, "1 bytes follow the last tensor"),
        ({"a": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, b"x", "needs 2 bytes, its offsets give 1"),
    ],
)
def test_a_header_that_lies(header: object, data: bytes, why: str, tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(DataError, match=r"header of x\.safetensors is damaged") as caught:
        read_header(tmp_path / "x.safetensors")
    assert caught.value.code == "header-damaged"
    assert why in caught.value.why


def test_a_header_that_claims_two_billion_elements(tmp_path: Path) -> None:
    header = {"a": entry(shape=(2_000_000_000,), offsets=(0, 8_000_000_000))}
    tracemalloc.start()
    with pytest.raises(DataError, match=r"x\.safetensors is truncated"):
        read_header(write(tmp_path / "x.safetensors", header, b"x" * 64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_length_beyond_the_cap_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES + 100)
    tracemalloc.start()
    with pytest.raises(DataError, match="not a safetensors file") as caught:
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "header-too-large"
    assert peak < 1_000_000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"\xff" * 8)
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_any_bytes_give_tensors_or_one_error(raw: bytes) -> None:
    check_fuzzed(raw)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["a", "b", "dtype", "shape", "data_offsets"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    ),
    st.integers(0, 64),
)
def test_any_json_gives_tensors_or_one_error(header: object, data_bytes: int) -> None:
    text = json.dumps(header).encode()
    check_fuzzed(len(text).to_bytes(8, "little") + text + b"x" * data_bytes)


def check_fuzzed(raw: bytes) -> None:
    descriptor, name = tempfile.mkstemp(suffix=".safetensors")
    os.close(descriptor)
    path = Path(name)
    path.write_bytes(raw)
    code, read_bytes = "", 0
    try:
        read_bytes = sum(i.size_bytes for i in read_header(path).values())
    except DataError as error:
        code = error.code
    path.unlink()
    assert code in {"", "shard-truncated", "header-damaged", "header-too-large"}
    assert read_bytes <= len(raw)
