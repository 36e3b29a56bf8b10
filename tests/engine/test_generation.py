"""What a caller can ask of the engine: sampling, stops, logprobs, limits, cancelling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from delivery.engine import LLM, EngineCore, Request, SamplingParams
from delivery.engine.sampler import Row, Sampler
from delivery.errors import DataError, EnvironmentLacking, UsageError


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint, block_size=16)


def sample(llm: LLM, prompts: list[str], **params: object) -> list[list[int]]:
    chosen = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **params})  # type: ignore[arg-type]
    return [out.token_ids for out in llm.generate(prompts, chosen)]


def test_seeded_draws_do_not_depend_on_the_batch(llm: LLM) -> None:
    alone = sample(llm, ["hello"], seed=7)[0]
    assert sample(llm, ["x", "hello", "yz"], seed=7)[1] == alone
    assert sample(llm, ["hello"], seed=8)[0] != alone
    assert len(set(alone)) > 8


def test_unseeded_draws_differ_between_requests_and_repeat_between_engines(tiny_checkpoint: Path) -> None:
    runs = []
    for _ in range(2):
        with LLM(tiny_checkpoint, seed=5) as engine:
            runs.append(sample(engine, ["a", "a"]))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrow_filters_are_greedy(llm: LLM, params: dict[str, float]) -> None:
    assert sample(llm, ["hello"], seed=1, **params) == sample(llm, ["hello"], temperature=0.0)


def test_logit_bias_and_penalties(llm: LLM) -> None:
    assert sample(llm, ["hi"], temperature=0.0, logit_bias={77: 100.0}) == [[77] * 16]
    loop = sample(llm, ["hello"], temperature=0.0)[0]
    assert len(set(loop)) < 8
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 50.0}):
        changed = sample(llm, ["hello"], temperature=0.0, **penalty)[0]
        assert len(set(changed)) > len(set(loop))


def test_eos_min_tokens_and_stop_ids(llm: LLM) -> None:
    ends = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={258: 100.0})
    out = llm.generate(["hello"], ends)[0]
    assert (out.token_ids, out.text, out.finish_reason) == ([258], "", "stop")
    later = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={258: 100.0}, min_tokens=4)
    out = llm.generate(["hello"], later)[0]
    assert len(out.token_ids) == 5
    assert out.token_ids[-1] == 258
    by_id = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={65: 100.0}, stop_token_ids=(65,))
    assert llm.generate(["hello"], by_id)[0].token_ids == [65]


def test_stop_string_across_tokens_is_left_out(llm: LLM) -> None:
    free = llm.generate(["hello"], SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True))[0]
    text = free.text
    stop = text[9:13]
    assert len(stop.encode()) >= 4
    out = llm.generate(["hello"], SamplingParams(max_tokens=24, temperature=1.0, seed=3, stop=(stop,)))[0]
    assert out.text == text[: text.index(stop)]
    assert out.finish_reason == "stop"
    assert llm.stats().kv_usage_ratio == 0.0


def test_streamed_text_never_shows_what_becomes_a_stop(tiny_checkpoint: Path) -> None:
    with EngineCore(tiny_checkpoint, wait_time_ms=0.0) as core:
        free = []
        core.add_request(Request("a", [104, 105], SamplingParams(max_tokens=24, seed=3, ignore_eos=True)))
        while core.has_unfinished():
            free += [o.new_text for o in core.step()]
        text = "".join(free)
        stop = text[6:9]
        core.add_request(
            Request("b", [104, 105], SamplingParams(max_tokens=24, seed=3, ignore_eos=True, stop=(stop,)))
        )
        seen = ""
        while core.has_unfinished():
            for output in core.step():
                seen += output.new_text
                assert text.startswith(seen)
        assert seen == text[: text.index(stop)]


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, ignore_eos=True, logit_bias={9: 50.0})
    out = llm.generate(["hello"], params)[0]
    ids = llm.encode("hello")
    assert out.logprobs is not None
    for entry, token in zip(out.logprobs, out.token_ids, strict=True):
        logprobs = torch.log_softmax(torch.cat(list(llm.logits(ids)))[-1], -1)
        assert entry.token_id == token == 9
        assert entry.logprob == pytest.approx(float(logprobs[9]), abs=1e-4)
        assert [t for t, _ in entry.top] == logprobs.topk(2).indices.tolist()
        assert entry.top[0][1] == pytest.approx(float(logprobs.max()), abs=1e-4)
        ids.append(token)


def test_mixed_sampling_in_one_batch(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    random = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    both = llm.generate(["hello", "hello"], [greedy, random])
    assert both[0].token_ids == llm.generate(["hello"], greedy)[0].token_ids
    assert both[1].token_ids == llm.generate(["hello"], random)[0].token_ids


def test_cancelling_frees_and_counts(tiny_checkpoint: Path) -> None:
    with EngineCore(tiny_checkpoint, wait_time_ms=0.0) as core:
        core.add_request(Request("a", [1] * 40, SamplingParams(max_tokens=50, temperature=0.0)))
        core.step()
        assert core.stats().running == 1
        assert core.stats().kv_usage_ratio > 0
        core.abort("a")
        core.abort("a")
        assert not core.has_unfinished()
        assert (core.stats().kv_usage_ratio, core.stats().cancelled) == (0.0, 1)


def test_refused_requests_leave_nothing(llm: LLM) -> None:
    with pytest.raises(UsageError, match="513 prompt tokens"):
        llm.generate([[1], [1] * 513], SamplingParams(max_tokens=4))
    with pytest.raises(UsageError, match="token id 400 is outside"):
        llm.generate([[400]])
    with pytest.raises(UsageError, match="no tokens"):
        llm.generate([[]])
    assert not llm.core.has_unfinished()


def test_options_are_checked(tiny_checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'block_size'"):
        LLM(tiny_checkpoint, blok_size=4)
    with pytest.raises(UsageError, match="kv is 'int7'"):
        LLM(tiny_checkpoint, kv="int7")
    with pytest.raises(UsageError, match=r"prefix_cache is 'false'[\s\S]*expected True or False"):
        LLM(tiny_checkpoint, prefix_cache="false")
    with pytest.raises(UsageError, match="max_position_embeddings 512"):
        LLM(tiny_checkpoint, max_model_len=513)


def test_a_plan_that_cannot_fit_shows_the_arithmetic(tiny_checkpoint: Path) -> None:
    with pytest.raises(EnvironmentLacking, match="KV blocks of 64 tokens") as caught:
        LLM(tiny_checkpoint, cache_max_entry_count=2, max_model_len=512)
    assert caught.value.code == "plan-does-not-fit"


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a checkpoint[\s\S]*no config\.json"):
        LLM(tmp_path)


def test_unseeded_draws_survive_a_preemption(tiny_checkpoint: Path) -> None:
    def run(**limits: int) -> tuple[dict[str, list[int]], int]:
        drawn: dict[str, list[int]] = {}
        sizes = {"block_size": 8, "max_model_len": 96, "wait_time_ms": 0.0}
        with EngineCore(tiny_checkpoint, **sizes, **limits) as core:
            for i in range(10):
                sampling = SamplingParams(max_tokens=60, ignore_eos=True)
                core.add_request(Request(f"r{i}", [i] * 20, sampling))
            while core.has_unfinished():
                for output in core.step():
                    drawn.setdefault(output.request_id, []).extend(output.new_token_ids)
            return drawn, core.stats().preemptions

    roomy, none = run()
    # With fewer places than requests, a preempted one continues in the place of another.
    narrow, some = run(cache_max_entry_count=24, max_num_seqs=6)
    assert none == 0 < some
    assert narrow == roomy


def test_a_stop_string_counts_from_min_tokens_on(llm: LLM) -> None:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logit_bias": {65: 100.0}}
    letter = llm.generate(["hello"], SamplingParams(**params))[0].text[0]
    out = llm.generate(["hello"], SamplingParams(**params, stop=(letter,), min_tokens=4))[0]
    assert (out.text, len(out.token_ids), out.finish_reason) == (letter * 4, 5, "stop")
    out = llm.generate(["hello"], SamplingParams(**params, stop=(letter,)))[0]
    assert (out.text, len(out.token_ids)) == ("", 1)


@pytest.mark.parametrize("ends", [[258, 5000], [-1], []])
def test_end_tokens_that_the_model_cannot_give(
    tiny_checkpoint: Path, tmp_path: Path, ends: list[int]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    if not ends:
        (folder / "tokenizer_config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with LLM(folder) as llm:
        assert llm.core.eos_token_ids == (() if not ends else (258,))
        params = SamplingParams(max_tokens=5, min_tokens=3, temperature=0.0, logit_bias={258: 100.0})
        assert len(llm.generate(["hi"], params)[0].token_ids) == (5 if not ends else 4)


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    sampler = Sampler(1, torch.device("cpu"), seed=0)
    row = Row(0, SamplingParams(temperature=0.0, logprobs=20), (), 0)
    position = torch.zeros(1, dtype=torch.int64)
    sampled = sampler.sample(torch.tensor([[0.0, 2.0, 1.0]]), [row], position, position)
    made = sampled.logprobs([1], [row])[0]
    assert made is not None
    assert [token for token, _ in made.top] == [1, 2, 0]
