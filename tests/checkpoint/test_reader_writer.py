"""What is written is read back bit by bit, in shards, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.errors import DataError, EnvironmentLacking

CONFIG = {"architectures": ["LlamaForCausalLM"]}
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    raw = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return raw > 0 if dtype == torch.bool else raw.to(dtype)


def read(path: Path) -> Checkpoint:
    return Checkpoint.open(path, CONFIG)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=8
    ),
    st.integers(1, 200),
)
def test_round_trip(specs: list, shard_bytes: int) -> None:
    tensors = {f"t{i}.weight": some(d, tuple(s), i) for i, (d, s) in enumerate(specs)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        with CheckpointWriter(out, shard_bytes) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            writer.finish(CONFIG)
        checkpoint = read(out)
        assert set(checkpoint.names()) == set(tensors)
        for name, tensor in tensors.items():
            back = checkpoint.tensor(name)
            assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))
        shards = {checkpoint.info(n).shard for n in checkpoint.names()}
        for shard in shards:
            inside = [n for n in checkpoint.names() if checkpoint.info(n).shard == shard]
            sizes = [checkpoint.info(n).size_bytes for n in inside]
            assert sum(sizes) <= max([shard_bytes, *sizes])
            assert set(load_file(out / shard)) == set(inside)


def test_big_shards_are_streamed_and_the_library_reads_them(tmp_path: Path) -> None:
    tensors = {f"t{i}": some(torch.bfloat16, (1000, 1000), i) for i in range(6)}
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(CONFIG)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_index_names_every_tensor_and_is_written_for_shards_only(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", 100) as writer:
        for i in range(3):
            writer.add(f"t{i}", torch.ones(20))
        writer.finish(CONFIG)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 240},
        "weight_map": {f"t{i}": f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)},
    }


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("t", base.t())
        writer.add("u", base[:, 1])
        writer.finish(CONFIG)
    checkpoint = read(tmp_path / "out")
    assert torch.equal(checkpoint.tensor("t"), base.t())
    assert torch.equal(checkpoint.tensor("u"), base[:, 1])


def write(out: Path, tensors: list[tuple[str, torch.Tensor]], fail: bool = False) -> None:
    with CheckpointWriter(out) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
        if fail:
            raise RuntimeError("stop")
        writer.finish(CONFIG)


@pytest.mark.parametrize("count", [2, 3_000_000])
def test_an_error_leaves_nothing_behind(count: int, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "keep").write_text("x")
    for out in (tmp_path / "out", tmp_path / "mine"):
        with pytest.raises(RuntimeError, match="stop"):
            write(out, [("t", torch.ones(count))], fail=True)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["mine", "mine/keep"]


def test_a_kill_leaves_no_checkpoint_and_the_next_run_succeeds(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch\n"
        "from delivery.checkpoint import CheckpointWriter\n"
        "w = CheckpointWriter(sys.argv[1], 1000)\n"
        "w.add('a', torch.ones(200)); w.add('b', torch.ones(5_000_000))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert killed.returncode == -9
    with pytest.raises(DataError, match="is not a checkpoint"):
        Checkpoint.open(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.ones(2))
        writer.finish(CONFIG)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EnvironmentLacking, match="no space left while writing") as caught:
        write(tmp_path / "out", [("t", torch.ones(2))])
    assert caught.value.code == "disk-full"
    assert list(tmp_path.iterdir()) == []


def test_a_name_can_be_written_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'t' was written before"):
        write(tmp_path / "out", [("t", torch.ones(2)), ("t", torch.ones(2))])


def test_nothing_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing was written"):
        write(tmp_path / "out", [])


def test_a_disk_that_loses_bytes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(source: Path, target: Path, real: Callable[..., None] = os.replace) -> None:
        real(source, target)
        if target.suffix == ".safetensors":
            target.write_bytes(
                target.read_bytes().replace(b"[2]", b"[1]", 1).replace(b"0,8]", b"0,4]", 1)[:-4]
            )

    monkeypatch.setattr(os, "replace", lossy)
    with pytest.raises(DataError, match="'t' was written wrongly") as caught:
        write(tmp_path / "out", [("t", torch.ones(2))])
    assert caught.value.why == "expected ('F32', [2]), read back ('F32', [1])"
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_other_files_travel_byte_for_byte(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_checkpoint.iterdir():
        (source / path.name).symlink_to(path)
    (source / "LICENSE").write_bytes(b"line\r\n\xff")
    (source / "sub").mkdir()
    (source / "sub" / "template.jinja").write_text("x")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").write_text("x")
    (source / "manifest.json").write_text("{}")
    checkpoint = Checkpoint.open(source)
    with CheckpointWriter(tmp_path / "out") as writer:
        copied = writer.copy_files(checkpoint)
        writer.add("t", torch.ones(2))
        writer.finish(checkpoint.config)
    assert set(copied) == {
        "LICENSE",
        "generation_config.json",
        "sub/template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        assert not (tmp_path / "out" / name).is_symlink()


def test_file_names_cannot_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="outside its own directory"), CheckpointWriter(tmp_path / "out") as w:
        w.add_file("../evil", b"x")
    assert list(tmp_path.iterdir()) == []


def test_writing_into_a_tensor_does_not_reach_the_file(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    name = checkpoint.names()[0]
    before = checkpoint.tensor(name).clone()
    checkpoint.tensor(name).zero_()
    assert torch.equal(checkpoint.tensor(name), before)


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    data = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert torch.equal(read(tmp_path).tensor("b"), torch.tensor([1.5, -2.0]))


def test_errors_survive_a_pickle() -> None:
    error = DataError("tensor-twice", "x", why="y")
    assert pickle.loads(pickle.dumps(error)).render() == error.render()


def test_the_door_loads_no_torch() -> None:
    code = (
        "import sys; from delivery.checkpoint import Checkpoint, CheckpointWriter, Tokenizer;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
