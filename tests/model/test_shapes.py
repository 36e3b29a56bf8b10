"""A weight whose shape does not follow from the config is named when it is read."""

from __future__ import annotations

import pytest
import tiny_families

from delivery.errors import DataError
from delivery.model import load_block, load_config
from delivery.model.load import StateDict, load_ends

CUTS = {
    "model.layers.0.self_attn.q_proj.weight": (slice(0, -8),),
    "model.layers.0.self_attn.o_proj.weight": (slice(None), slice(0, -8)),
    "model.layers.0.mlp.down_proj.weight": (slice(None), slice(0, -8)),
    "model.layers.0.input_layernorm.weight": (slice(0, -8),),
}
ENDS = {
    "model.embed_tokens.weight": "fewer rows than the vocabulary",
    "lm_head.weight": "fewer rows than the vocabulary",
    "model.norm.weight": "another shape than its config implies",
}


@pytest.mark.parametrize("name", CUTS)
def test_a_weight_of_another_size_is_named(name: str) -> None:
    model = tiny_families.build("llama")
    tensors = dict(tiny_families.tensors(model))
    config = load_config(model.config.to_dict())
    load_block(StateDict(tensors), config, 0)
    tensors[name] = tensors[name][CUTS[name]].contiguous()
    with pytest.raises(DataError, match="another shape than its config implies") as caught:
        load_block(StateDict(tensors), config, 0)
    assert name in caught.value.what


@pytest.mark.parametrize("name", ENDS)
def test_ends_of_another_size_are_named(name: str) -> None:
    model = tiny_families.build("llama")
    tensors = dict(tiny_families.tensors(model))
    config = load_config(model.config.to_dict())
    load_ends(StateDict(tensors), config)
    tensors[name] = tensors[name][:-8].contiguous()
    with pytest.raises(DataError, match=ENDS[name]) as caught:
        load_ends(StateDict(tensors), config)
    assert name in caught.value.what
