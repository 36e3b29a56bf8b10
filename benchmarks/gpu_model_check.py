"""Whole models on a GPU against transformers: bf16 logits, and every greedy decode step.

    python benchmarks/gpu_model_check.py          the 8B shape in 4 layers, small models of many families
    python benchmarks/gpu_model_check.py mixtral  these families only; mixtral:w4 with weights in 4 bits

The truth is transformers in float32. The engine may be as far from it as transformers in bf16 is, times
`SLACK`; a greedy token must be within that distance of the truth's best. Routers of small models are made to
choose by the token alone: undecided ones send tokens another way for a rounding, and what comes of that says
nothing about the kernels.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from quantised_tiny import write_both

from delivery.checkpoint.convert import convert, open_source
from delivery.engine.core import EngineCore
from delivery.engine.request import Request, SamplingParams

SLACK = 1.25
PROMPTS = (1, 63, 64, 65, 700)
NEW_TOKENS = 48
TINY_SLACK = 2.0
"""Of small models: a few hundred numbers, so a ratio of two rounding errors spreads widely."""
TINY_PROMPTS = (1, 31, 32, 65, 150)
TINY_NEW_TOKENS = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = (
    "gemma2", "gemma3", "phi3-window", "phi4-partial", "glm4", "granite", "mixtral", "qwen2-moe", "qwen3-moe",
    "qwen3-next", "qwen3.5", "qwen3.5-moe",
    "llama:w4", "llama:w8", "mixtral:w4", "mixtral:w8", "qwen3-moe:w4",
)  # fmt: skip


def small_llama() -> Any:
    """4 layers of the 8B shape with a smaller vocabulary, random weights, bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    with torch.device(DEVICE):
        return in_dtype(LlamaForCausalLM(config).eval(), torch.bfloat16)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters in `dtype`; buffers, such as rotary frequencies, stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def decided(model: Any, generator: torch.Generator) -> Any:
    """The model with routers that nothing in doubt can sway: expert e's score is a feature of the token's
    embedding that no layer writes to, half a step from every other expert's."""
    named = dict(model.named_parameters())
    gates = [gate.data for name, gate in named.items() if name.endswith("mlp.gate.weight")]
    if not gates:
        return model
    count = len(gates[0])
    table = model.get_input_embeddings().weight.data
    ranks = torch.rand(len(table), count, generator=generator).argsort(1)
    table[:, :count] = (ranks - (count - 1) / 2).to(table) / 2
    for name, parameter in named.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            parameter.data[..., :count, :] = 0
        elif name.endswith("post_attention_layernorm.weight"):
            parameter.data[:count] = parameter.data[0].clone()
    for layer, gate in enumerate(gates):
        expert = torch.arange(count)
        gate.zero_()[expert, (expert + layer) % count] = 4.0
    return model


def logits_of(model: Any, tokens: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """float32 logits [n, V] of each sequence, by transformers in `dtype`; the model's weights are bf16."""
    in_dtype(model, dtype)
    with torch.inference_mode():
        out = [model(torch.tensor([t], device=DEVICE), use_cache=False).logits[0].float() for t in tokens]
    in_dtype(model, torch.bfloat16)
    return out


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a − b‖ / ‖b‖ of a token's logits [V], median over the tokens."""
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def check(
    path: Path, model: Any, lengths: tuple[int, ...], new_tokens: int, slack: float, **options: object
) -> bool:
    """Print the distances of one model; whether all are within bounds."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    with EngineCore(path, device=DEVICE, max_num_seqs=8, cache_max_entry_count=512, **options) as engine:
        ours = [torch.cat(list(engine.prompt_logits(p))).float() for p in prompts]
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(str(index), list(prompt), sampling))
        made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        while engine.has_unfinished():
            for output in engine.step():
                made[output.request_id] += output.new_token_ids
    whole = [prompt + made[str(i)] for i, prompt in enumerate(prompts)]
    truth = logits_of(model, whole, torch.float32)
    peer = logits_of(model, whole, torch.bfloat16)
    good, lines = True, []
    for index, prompt in enumerate(prompts):
        n = len(prompt)
        mine, theirs = distance(ours[index], truth[index][:n]), distance(peer[index][:n], truth[index][:n])
        steps = truth[index][n - 1 : -1]
        chosen = steps.gather(1, torch.tensor(made[str(index)], device=DEVICE)[:, None])[:, 0]
        behind = float((steps.max(-1).values - chosen).max())
        spread = float((peer[index] - truth[index]).abs().max())
        passed = mine <= theirs * slack and behind <= 2 * spread
        good &= passed
        lines.append(f"{n}: {mine:.4f}/{theirs:.4f} {behind:.3f}/{spread:.3f}{'' if passed else ' WRONG'}")
    # prompt's length: distance of logits/that of transformers in bf16, then how far greedy tokens are behind
    # the truth's best/the largest error of transformers in bf16.
    print("  ", "; ".join(lines), "ok" if good else "WRONG", flush=True)
    return good


def check_family(name: str) -> bool:
    """A small model of one family, with and without recorded steps. name: `family`, or `family:w4`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import tiny_families
    import transformers

    family, _, kind = name.partition(":")
    results = []
    with tempfile.TemporaryDirectory() as work:
        folder, published = Path(work, "engine"), Path(work, "published")
        changes = {"intermediate_size": 128, "moe_intermediate_size": 64} if kind else {}
        model = decided(tiny_families.build(family, **changes), torch.Generator().manual_seed(2))
        model = in_dtype(model, torch.bfloat16)
        model.save_pretrained(published)
        convert(open_source(published), folder, 10**9, lambda done: None)
        if kind:
            write_both(folder, Path(work, "quantised"), Path(work, "plain"), kind)
            folder = Path(work, "quantised")
            model = transformers.AutoModelForCausalLM.from_pretrained(Path(work, "plain"), dtype="bfloat16")
        model.eval().to(DEVICE)
        for options in ({}, {"graphs": False, "max_num_batched_tokens": 40}):
            print(name, options or "defaults", flush=True)
            sizes = (TINY_PROMPTS, TINY_NEW_TOKENS, TINY_SLACK)
            try:
                results.append(check(folder, model, *sizes, block_size=16, **options))
            except Exception as failure:  # the other families are to be seen too
                print(f"   {type(failure).__name__}: {failure} WRONG", flush=True)
                results.append(False)
            gc.collect()
    return all(results)


def check_llama() -> bool:
    """The 8B shape in four layers, in several settings."""
    model, results = small_llama(), []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for options in ({}, {"graphs": False}, {"block_size": 16}, {"max_num_batched_tokens": 96}):
            print("llama", options or "defaults", flush=True)
            results.append(check(Path(folder), model, PROMPTS, NEW_TOKENS, SLACK, **options))
            gc.collect()
    return all(results)


def main() -> None:
    names = sys.argv[1:] or ("llama", *FAMILIES)
    results = [check_llama() if name == "llama" else check_family(name) for name in names]
    print(sum(results), "of", len(results), "models right")
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
