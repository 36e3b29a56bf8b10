"""A checkpoint's tensors are held against its architecture by their names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny_families
import tiny_vision

from delivery.checkpoint.complete import check_complete
from delivery.errors import DataError


@pytest.mark.parametrize("name", ["llama-tied", "phi3", "gemma3", "glm4", "mixtral", "qwen2-moe"])
def test_every_needed_tensor_is_asked_for(name: str) -> None:
    model = tiny_families.build(name)
    config, names = model.config.to_dict(), set(tiny_families.tensors(model))
    check_complete(config, names)
    spare = {n for n in names if n.endswith(".bias")} | {"lm_head.weight"}
    for left_out in names - spare:
        with pytest.raises(DataError, match="the checkpoint has no tensor") as caught:
            check_complete(config, names - {left_out})
        assert left_out in caught.value.what


def test_experts_may_be_stacked_and_layers_packed() -> None:
    model = tiny_families.build("qwen3-moe")
    config, names = model.config.to_dict(), set(model.state_dict())
    assert any(n.endswith("experts.gate_up_proj") for n in names)
    check_complete(config, names)
    check_complete(config, {n.replace("k_proj.weight", "k_proj.qweight") for n in names})


def test_a_language_tower_is_found_where_it_is() -> None:
    model = tiny_vision.build("LlavaForConditionalGeneration")
    config = {**model.config.to_dict(), "architectures": ["LlavaForConditionalGeneration"]}
    check_complete(config, set(model.state_dict()))


def test_no_torch_is_loaded() -> None:
    code = "import sys, delivery.checkpoint.complete; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
