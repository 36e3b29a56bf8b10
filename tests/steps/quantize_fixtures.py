"""A tiny seeded Llama on disk, with a tokenizer and a chat template, and a context for running steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from delivery.artifact import Artifact, Kind, Manifest, hash_tree
from delivery.checkpoint import CheckpointWriter

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = (
    "the quick brown fox jumps over the lazy dog and a permission is granted to any person obtaining a copy "
)


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 2,
        **changes,
    }


def write_checkpoint(directory: Path, *, seed: int = 0, bias: bool = False, **changes: Any) -> Path:
    """A model directory with weights in bfloat16."""
    c = config(**changes)
    random = torch.Generator().manual_seed(seed)
    h, i, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    dtype = getattr(torch, c["dtype"])

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).to(dtype)

    def norm() -> torch.Tensor:
        weight = 1 + 0.1 * torch.randn(h, generator=random)
        weight[:: h // 4] *= 4
        return weight.to(dtype)

    with CheckpointWriter(directory) as writer:
        writer.add("model.embed_tokens.weight", normal(c["vocab_size"], h) * 8)
        for n in range(c["num_hidden_layers"]):
            at = f"model.layers.{n}"
            for name, rows, columns in (
                ("self_attn.q_proj", q, h),
                ("self_attn.k_proj", kv, h),
                ("self_attn.v_proj", kv, h),
                ("self_attn.o_proj", h, q),
                ("mlp.gate_proj", i, h),
                ("mlp.up_proj", i, h),
                ("mlp.down_proj", h, i),
            ):
                # Small steps along the residual stream, so that errors add up instead of growing.
                share = 0.2 if rows == h and name != "self_attn.q_proj" else 1.0
                writer.add(f"{at}.{name}.weight", normal(rows, columns) * share)
                if bias:
                    writer.add(f"{at}.{name}.bias", normal(1, rows)[0])
            writer.add(f"{at}.input_layernorm.weight", norm())
            writer.add(f"{at}.post_attention_layernorm.weight", norm())
        writer.add("model.norm.weight", norm())
        writer.finish(c)
    for name, text in tokenizer_files(c["vocab_size"]).items():
        (directory / name).write_text(text, "utf-8")
    return directory


def tokenizer_files(vocab_size: int) -> dict[str, str]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    bos = [(SPECIAL[0], 0)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=bos)
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "chat_template": TEMPLATE,
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings)}


class Silent:
    """A progress task that remembers its notes."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.done = 0.0

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@dataclass
class Context:
    """A StepContext over plain folders."""

    out: Path
    scratch: Path
    bound: dict[str, Artifact] = field(default_factory=dict)
    device: str = "cpu"
    seed: int = 0
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[tuple[str, str]] = field(default_factory=list)

    def input(self, role: str) -> Artifact:
        return self.bound[role]

    def inputs(self, role: str) -> list[Artifact]:
        return [self.bound[role]] if role in self.bound else []

    def has(self, role: str) -> bool:
        return role in self.bound

    def progress(self, title: str, total: float, unit: str) -> Silent:
        return Silent(self.notes)

    def metric(self, name: str, value: float, unit: str, direction: str) -> None:
        self.metrics[name] = value

    def finding(self, severity: str, text: str) -> None:
        self.findings.append((severity, text))

    def texts(self, severity: str) -> str:
        return "\n".join(text for s, text in self.findings if s == severity)


def context(folder: Path, name: str, **inputs: Path) -> Context:
    """Fresh folders for one run of a step; inputs by role."""
    out, scratch = folder / name, folder / f"{name}-scratch"
    out.mkdir(parents=True)
    scratch.mkdir(exist_ok=True)
    kinds = {"checkpoint": Kind.CHECKPOINT, "calibration": Kind.CALIBRATION}
    bound = {r: Artifact(p, Manifest(kinds[r], "test", 1, files=hash_tree(p))) for r, p in inputs.items()}
    return Context(out, scratch, bound)
