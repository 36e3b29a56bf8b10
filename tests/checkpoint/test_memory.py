"""Converting needs the memory of a tensor, not of a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from tiny_checkpoint import write_tokenizer

from delivery.checkpoint import CheckpointWriter

TENSOR_BYTES = 16_000_000
COUNT = 14
CODE = """
import resource, sys, json
from pathlib import Path
import torch
from delivery.checkpoint.convert import convert, open_source
torch.aminmax(torch.ones(1000, dtype=torch.bfloat16))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = open_source(Path(sys.argv[1]))
convert(source, Path(sys.argv[2]), 100_000_000, lambda done: None)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"grown": (after - before) * 1024, "predicted": source.peak_bytes}))
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}


def test_memory_grows_by_little_more_than_a_tensor(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "source", 60_000_000) as writer:
        for index in range(COUNT):
            writer.add(f"model.layers.{index}.w.weight", torch.ones(4000, TENSOR_BYTES // 8000).bfloat16())
        writer.finish(CONFIG)
    write_tokenizer(tmp_path / "source")
    command = [sys.executable, "-c", CODE, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["grown"] < 3 * TENSOR_BYTES < COUNT * TENSOR_BYTES / 4
    assert found["grown"] <= found["predicted"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
