"""A checkpoint's tensors are held against its architecture by their names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import tiny_families
import tiny_vision

from delivery.checkpoint.complete import check_complete, check_shapes
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


class Shaped:
    """An outline over shapes alone."""

    quantization = None

    def __init__(self, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.config, self.shapes = config, shapes

    def names(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def has(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def size_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("name", sorted(tiny_families.MODELS))
def test_every_matrix_and_norm_of_the_layers_has_the_shape_that_the_config_implies(name: str) -> None:
    model = tiny_families.build(name)
    shapes = {n: tuple(t.shape) for n, t in tiny_families.tensors(model).items()}
    config = model.config.to_dict()
    check_shapes(Shaped(config, shapes))
    refused = [refused_for(Shaped(config, shapes | {n: (s[0] - 1, *s[1:])})) for n, s in shapes.items()]
    assert all(not what or n in what for n, what in zip(shapes, refused, strict=True))
    assert sum(map(bool, refused)) > len(shapes) // 3


def refused_for(outline: Shaped) -> str:
    """What is said of the shapes; empty when they agree with the config."""
    try:
        check_shapes(outline)
    except DataError as error:
        return error.what
    return ""
