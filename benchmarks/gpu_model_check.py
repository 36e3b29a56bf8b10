"""The whole model on a GPU against transformers: bf16 logits, and every greedy decode step.

The truth is transformers in float32. The engine may be as far from it as transformers in bf16 is, times
`SLACK`; a greedy token must be within that distance of the truth's best.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from delivery.engine.core import EngineCore
from delivery.engine.request import Request, SamplingParams

SLACK = 1.25
PROMPTS = (1, 63, 64, 65, 700)
NEW_TOKENS = 48


def small_llama(directory: Path) -> None:
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
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def reference_logits(path: Path, tokens: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """float32 logits [n, V] of each sequence, by transformers in `dtype`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()
    with torch.inference_mode():
        out = [model(torch.tensor([t], device="cuda")).logits[0].float() for t in tokens]
    del model
    torch.cuda.empty_cache()
    return out


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


def check(path: Path, **options: object) -> bool:
    """Print the distances of one model; whether all are within bounds."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 8192, (n,), generator=generator).tolist() for n in PROMPTS]
    with EngineCore(path, device="cuda", max_num_seqs=8, cache_max_entry_count=512, **options) as engine:
        ours = [torch.cat(list(engine.prompt_logits(p))).float() for p in prompts]
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(str(index), list(prompt), sampling))
        made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        while engine.has_unfinished():
            for output in engine.step():
                made[output.request_id] += output.new_token_ids
    whole = [prompt + made[str(i)] for i, prompt in enumerate(prompts)]
    truth = reference_logits(path, whole, torch.float32)
    peer = reference_logits(path, whole, torch.bfloat16)
    good = True
    for index, prompt in enumerate(prompts):
        n = len(prompt)
        mine, theirs = distance(ours[index], truth[index][:n]), distance(peer[index][:n], truth[index][:n])
        steps = truth[index][n - 1 : -1]
        chosen = steps.gather(1, torch.tensor(made[str(index)], device="cuda")[:, None])[:, 0]
        behind = float((steps.max(-1).values - chosen).max())
        spread = float((peer[index] - truth[index]).abs().max())
        passed = mine <= theirs * SLACK and behind <= 2 * spread
        good &= passed
        print(
            f"  prompt {n:4d}: logits {mine:.4f} (transformers bf16 {theirs:.4f}), greedy {behind:.4f} "
            f"behind the best at most (bf16 spread {spread:.4f}) {'ok' if passed else 'WRONG'}",
            flush=True,
        )
    return good


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        small_llama(path)
        results = []
        for options in ({}, {"graphs": False}, {"block_size": 16}, {"max_num_batched_tokens": 96}):
            print(options or "defaults", flush=True)
            results.append(check(path, **options))
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
