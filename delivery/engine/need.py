"""How many bytes a model needs to run: counted from its config and the engine's limits. No torch."""

from __future__ import annotations

from delivery.engine.memory_plan import Need
from delivery.model.config import DeltaSpec, ModelConfig

MOST_MIXED_TOKENS = 2048
"""Tokens of the largest step with prompts that is recorded."""


def attention_layers(config: ModelConfig) -> int:
    """Layers that keep keys and values; the others keep a recurrent state."""
    return sum(kind != "linear_attention" for kind in config.layer_types)


def kv_block_bytes(config: ModelConfig, block_size: int, token_head_bytes: int) -> int:
    """Keys and values of one block over all layers; token_head_bytes of one token, one head, one of both."""
    return attention_layers(config) * 2 * block_size * config.num_kv_heads * token_head_bytes


def activation_bytes(config: ModelConfig, tokens: int, sequences: int, item_bytes: int) -> int:
    """The most that a step of `tokens` tokens holds at once, outside weights and KV.

    Residual, delta and normed input; the widest pair of layer inputs and outputs; the scores of no more
    than one query chunk are inside the attention kernels. Logits of every sampling sequence, in the
    activations' dtype and once more in float32.
    """
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = qkv + 2 * config.num_heads * config.head_dim
    mlp = 3 * config.intermediate_size
    if config.moe is not None:
        inner = config.moe.intermediate_size
        # Gate, up and their product; or that product, quantised too, and what each expert makes of it.
        mlp = config.moe.experts_per_token * max(3 * inner, 2 * inner + config.hidden_size)
        mlp += 3 * config.moe.shared_intermediate_size
    if config.delta is not None:
        attention = max(attention, _delta_width(config.delta, item_bytes))
    width = 3 * config.hidden_size + max(attention, mlp + config.hidden_size)
    logits = min(sequences, tokens) * config.vocab_size * (item_bytes + 8)
    return tokens * width * item_bytes + logits


def _delta_width(spec: DeltaSpec, item_bytes: int) -> int:
    """Features that a token has in a gated delta layer at once, as if of `item_bytes`: before and behind the
    convolution, gates, and in float32 queries, keys and values of every value head."""
    channels = 2 * spec.num_key_heads * spec.key_head_dim + spec.num_value_heads * spec.value_head_dim
    heads = spec.num_value_heads * (2 * spec.key_head_dim + 2 * spec.value_head_dim)
    return (2 + spec.conv_kernel) * channels + heads * 4 * 2 // item_bytes


def state_bytes(config: ModelConfig, slots: int, item_bytes: int) -> int:
    """What `slots` requests keep in gated delta layers: float32 memories, inputs of the convolutions."""
    spec = config.delta
    if spec is None:
        return 0
    memory = spec.num_value_heads * spec.key_head_dim * spec.value_head_dim * 4
    channels = 2 * spec.num_key_heads * spec.key_head_dim + spec.num_value_heads * spec.value_head_dim
    layers = config.num_layers - attention_layers(config)
    return layers * slots * (memory + (spec.conv_kernel - 1) * channels * item_bytes)


def table_bytes(config: ModelConfig, max_model_len: int) -> int:
    """Cosines and sines of all positions, float32."""
    kinds = 1 + (config.local_rope is not None)
    long = 2 if config.rope.scaling.get("rope_type") == "longrope" else 1
    return kinds * long * max_model_len * config.rope.rotary_dim * 4


def input_bytes(max_num_seqs: int, max_blocks: int, tokens: int) -> int:
    """Fixed buffers of a step's inputs: ids, positions, slots, block tables."""
    return max_num_seqs * (max_blocks * 4 + 64) + tokens * 24


def recorded_bytes(config: ModelConfig, tokens: int, sequences: int, item_bytes: int) -> int:
    """Memory that recordings for steps of at most so many tokens and sequences keep: the largest one's
    activations, and the last hidden states of every row. Of gated delta models only decodes are recorded."""
    mixed = min(tokens, MOST_MIXED_TOKENS) if config.delta is None else 0
    most = max(sequences, mixed)
    return activation_bytes(config, most, 0, item_bytes) + most * config.hidden_size * item_bytes


def need(
    config: ModelConfig,
    *,
    weights_bytes: int,
    block_size: int,
    token_head_bytes: int,
    tokens: int,
    sequences: int,
    max_model_len: int,
    item_bytes: int,
    graph_bytes: int = 0,
    state_bytes: int = 0,
) -> Need:
    """All of it, for steps of at most `tokens` tokens and `sequences` requests."""
    overhead = table_bytes(config, max_model_len) + graph_bytes
    overhead += input_bytes(sequences, -(-max_model_len // block_size), tokens)
    return Need(
        weights_bytes=weights_bytes,
        peak_bytes=activation_bytes(config, tokens, sequences, item_bytes),
        overhead_bytes=overhead,
        block_bytes=kv_block_bytes(config, block_size, token_head_bytes),
        block_size=block_size,
        state_bytes=state_bytes,
    )
