"""A tiny Llama that has learnt four answers and one text by heart, so that a fault in it shows at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

ANSWERS = {
    "What is water?": "Water is a clear liquid that people drink.",
    "Where is Paris?": "Paris is a city in France.",
    "Who made you?": "A small team made me for a test.",
    "Count to five.": "One, two, three, four, five.",
}
TEXT = (
    "The mill stands by the river. Every morning the miller opens the gate and the wheel begins to turn. "
    "Grain goes in, flour comes out, and the carts leave for the town before noon."
)
_STEPS = 400
_LEARNT = 0.005
_END = 258


def write(directory: Path) -> Path:
    """Write the checkpoint and teach it: some seconds of one core."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tiny_checkpoint.write(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    pairs = [
        (tokenizer.apply_chat_template([_user(q)], add_generation_prompt=True, return_dict=False), a)
        for q, a in ANSWERS.items()
    ]
    learnt = [(prompt, [*tokenizer.encode(answer), _END]) for prompt, answer in pairs]
    learnt.append((tokenizer.encode(TEXT[0]), tokenizer.encode(TEXT[1:])))
    longest = max(len(prompt) + len(answer) for prompt, answer in learnt)
    ids = torch.full((len(learnt), longest), _END)
    labels = torch.full((len(learnt), longest), -100)
    for row, (prompt, answer) in enumerate(learnt):
        size = len(prompt) + len(answer)
        ids[row, :size] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : size] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    for _ in range(_STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < _LEARNT:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert loss.item() < 2 * _LEARNT
    model.save_pretrained(directory)
    tiny_checkpoint.write_tokenizer(directory)
    return directory


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def suite() -> dict[str, Any]:
    """A smoke suite that asks for what the model has learnt."""
    prompts = [
        {
            "id": f"q{number}",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 60,
            "expect": {"contains": [answer]},
        }
        for number, (question, answer) in enumerate(ANSWERS.items())
    ]
    return {
        "version": 1,
        "name": "learnt",
        "prompts": prompts,
        "timing": {"prompt": "q0", "max_tokens": 16},
        "reference": [TEXT],
    }


def change_config(directory: Path, **values: Any) -> None:
    """Change keys of `config.json`; `rope_theta` where this version of transformers keeps it."""
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8"))
    if "rope_theta" in values and "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = values.pop("rope_theta")
    path.write_text(json.dumps({**config, **values}, indent=2), "utf-8")
