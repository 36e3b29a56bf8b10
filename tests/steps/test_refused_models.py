"""What convert refuses by config and headers alone, before anything is hashed or read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from delivery.errors import DataError
from delivery.steps.calibrate import Calibrate
from delivery.steps.convert import Convert
from delivery.steps.step import Ahead


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hidden_size": 128}, "hidden_size is not that of the weights[\\s\\S]*it is 128, .*rows of 64"),
        ({"num_hidden_layers": 3}, "the checkpoint has no tensor model.layers.2"),
        ({"architectures": ["LlamaForCausalML"]}, "LlamaForCausalML is not supported"),
        ({"architectures": []}, "config.json does not say what the model is"),
    ],
)
def test_a_config_that_is_not_of_these_weights(values: dict[str, Any], expected: str, copy: Path) -> None:
    change(copy, **values)
    with pytest.raises(DataError, match=expected):
        Convert(model=str(copy)).preflight({})


def test_a_key_that_stands_twice(copy: Path) -> None:
    path = copy / "config.json"
    path.write_text('{"hidden_size": 32, ' + path.read_text().lstrip()[1:])
    with pytest.raises(DataError, match=r"config\.json cannot be read\n  why:  'hidden_size' occurs twice"):
        Convert(model=str(copy)).preflight({})


def test_a_corpus_is_looked_for_at_once(copy: Path) -> None:
    with pytest.raises(DataError, match=r"there is no corpus 'legl'[\s\S]*did you mean 'legal'"):
        Calibrate(corpus="legl").preflight({"checkpoint": [Ahead("convert", {}, copy)]})


def test_what_convert_will_write_is_predicted(copy: Path) -> None:
    outline = Convert(model=str(copy)).outline({})
    assert outline is not None
    assert outline.shape("model.embed_tokens.weight") == (259, 64)
    assert outline.has("model.layers.1.mlp.down_proj.weight")
    assert outline.quantization is None
    assert outline.config["hidden_size"] == 64
