"""The engine against transformers: logits within 1e-4 in float32, greedy tokens equal, however scheduled."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import MODELS, build

from delivery.checkpoint.convert import convert, open_source
from delivery.engine import LLM, SamplingParams

PROMPT_LENGTHS = (1, 7, 8, 9, 33)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def save(name: str, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    """The model as a published checkpoint would be, converted into `directory`."""
    model = build(name, **changes)
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        convert(open_source(Path(source)), directory, 10**9, lambda done: None)
    return model


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 99, (n,), generator=generator).tolist() for n in lengths]


def assert_greedy(
    model: transformers.PreTrainedModel, prompt: list[int], made: list[int], count: int = 12
) -> None:
    """Every output token is what transformers finds likeliest after all of the text before it."""
    assert len(made) == count
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made


@pytest.mark.parametrize("name", MODELS)
def test_every_family(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    with LLM(tmp_path, block_size=8, max_num_batched_tokens=16) as llm:
        for prompt in prompts((33, 8)):
            ours = torch.cat(list(llm.logits(prompt)))
            with torch.no_grad():
                theirs = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        completions = llm.generate(prompts(), GREEDY)
    for prompt, made in zip(prompts(), completions, strict=True):
        assert_greedy(model, prompt, made.token_ids)
        assert made.finish_reason == "length"


def test_longrope_changes_its_factors_while_a_request_runs(tmp_path: Path) -> None:
    model = save("phi3-longrope", tmp_path)
    prompt = prompts((28,))[0]
    with LLM(tmp_path, block_size=8, max_num_batched_tokens=16) as llm:
        made = llm.generate([prompt], GREEDY)[0].token_ids
    with torch.no_grad():
        theirs = [model(torch.tensor([prompt + made[:i]])).logits[0, -1].argmax() for i in range(12)]
    assert made == [int(token) for token in theirs]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, save("llama", directory)


SCHEDULES: dict[str, dict[str, Any]] = {
    "tiny-steps": {"max_num_batched_tokens": 3},
    "one-at-a-time": {"max_num_seqs": 1},
    "few-blocks": {"cache_max_entry_count": 10, "max_model_len": 64},
    "no-prefix-cache": {"prefix_cache": False},
    "decodes-first": {"enable_prefill": False, "max_num_batched_tokens": 9},
    "blocks-of-16": {"block_size": 16},
    "blocks-of-64": {"block_size": 64},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_does_not_change_greedy_output(
    schedule: str, llama: tuple[Path, transformers.PreTrainedModel]
) -> None:
    directory, model = llama
    with LLM(directory, **{"block_size": 8, **SCHEDULES[schedule]}) as llm:
        made = llm.generate([*prompts(), *prompts()], GREEDY)
        if schedule == "few-blocks":
            assert llm.stats().preemptions > 0
        llm.core.scheduler.pool.check_integrity()
        assert llm.stats().kv_usage_ratio == 0.0
    for prompt, completion in zip([*prompts(), *prompts()], made, strict=True):
        assert_greedy(model, prompt, completion.token_ids)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("hybrid")
    return directory, save("qwen3.5", directory)


@pytest.mark.parametrize("schedule", ["tiny-steps", "one-at-a-time", "few-blocks", "decodes-first"])
def test_recurrent_state_follows_its_request(
    schedule: str, hybrid: tuple[Path, transformers.PreTrainedModel]
) -> None:
    directory, model = hybrid
    with LLM(directory, **{"block_size": 8, **SCHEDULES[schedule]}) as llm:
        made = llm.generate([*prompts(), *prompts()], GREEDY)
        assert (llm.stats().preemptions > 0) == (schedule == "few-blocks")
        # A prompt that is scored has a state of its own, and no prefix is taken from the cache.
        before = list(llm.logits(prompts()[4]))
        again = llm.generate([prompts()[4]], GREEDY)[0]
        assert again.num_cached_tokens == 0
    for prompt, completion in zip([*prompts(), *prompts()], made, strict=True):
        assert_greedy(model, prompt, completion.token_ids)
    assert again.token_ids == made[4].token_ids
    with torch.no_grad():
        theirs = model(torch.tensor([prompts()[4]])).logits[0]
    torch.testing.assert_close(torch.cat(before), theirs, atol=1e-4, rtol=0)


def test_recurrent_state_is_in_the_plan(hybrid: tuple[Path, transformers.PreTrainedModel]) -> None:
    with LLM(hybrid[0], max_num_seqs=3) as llm:
        states = [s for s in llm.core._runner.cache.states if s is not None]
        assert len(states) == 2
        held = sum(t.numel() * t.element_size() for s in states for t in (s.conv, s.memory))
        assert llm.core.plan.state_bytes == held > 0


def test_shared_prefix_is_reused_and_changes_nothing(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    directory, model = llama
    head = prompts((40,))[0]
    with LLM(directory, block_size=8) as llm:
        for tail in ([5], [6, 7], [5]):
            made = llm.generate([[*head, *tail]], GREEDY)[0]
            assert_greedy(model, [*head, *tail], made.token_ids)
        assert made.num_cached_tokens == 40
        assert llm.stats().cached_tokens == 80


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_quantised_cache_is_close(kv: str, llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    directory, model = llama
    prompt = prompts((33,))[0]
    with torch.no_grad():
        theirs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    with LLM(directory, block_size=8, kv=kv, max_num_batched_tokens=16) as llm:
        ours = torch.log_softmax(torch.cat(list(llm.logits(prompt))), -1)
        divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        limits = {"int8": 1e-3, "fp8": 0.05, "int4": 0.2}
        assert 1e-9 < divergence < limits[kv]
        assert llm.generate([prompt], GREEDY)[0].finish_reason == "length"


def test_score_is_the_log_probability_of_each_token(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    directory, model = llama
    prompt = prompts((33,))[0]
    with LLM(directory, block_size=8, max_num_batched_tokens=16) as llm:
        scores = llm.score([prompt])[0]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert scores.shape == (32,)
    torch.testing.assert_close(torch.from_numpy(scores), expected, atol=1e-4, rtol=0)
