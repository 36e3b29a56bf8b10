"""What a caller does wrong, or breaks off, leaves an engine that still gives the right answers."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delivery.engine import LLM, SamplingParams
from delivery.errors import EnvironmentLacking, UsageError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint, block_size=16)


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("before", [True, False])
def test_a_broken_off_step_spoils_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int, before: bool
) -> None:
    prompts = ["hello", LONG]
    right = [out.token_ids for out in llm.generate(prompts, GREEDY)]
    llm.core.scheduler.pool.reset_cache()
    submit, count = llm.core._executor.submit, 0

    def interrupted(work: Any) -> Any:
        nonlocal count
        count += 1
        if count < at:
            return submit(work)
        if not before:
            submit(work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.core._executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
    assert llm.stats().kv_usage_ratio == 0.0
    # A block that was promised to hold this prefix, and was never filled, would show here.
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == right


def test_waiting_requests_outlive_a_failed_step(tiny_checkpoint: Path) -> None:
    from delivery.engine import EngineCore, Request

    with EngineCore(tiny_checkpoint, wait_time_ms=0.0, max_num_seqs=1) as core:
        for name in ("first", "second"):
            core.add_request(Request(name, [5, 6, 7], GREEDY))
        submit = core._executor.submit
        core._executor.submit = lambda work: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            core.step()
        core._executor.submit = submit  # type: ignore[method-assign]
        seen = [output for _ in range(20) for output in core.step()]
        assert {output.request_id for output in seen} == {"second"}
        assert seen[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"stop_token_ids": (10**9,), "min_tokens": 1}, "token id 1000000000 is outside"),
        ({"stop_token_ids": (-1,)}, "token id -1 is outside"),
        ({"logit_bias": {300: 1.0}}, "token id 300 is outside"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(llm: LLM, params: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        llm.generate(["hello"], SamplingParams(max_tokens=4, **params))
    assert not llm.core.has_unfinished()


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 2.5},
        {"max_tokens": 0},
        {"seed": "7"},
        {"top_k": 1.0},
        {"top_k": None},
        {"top_k": 2**40},
        {"logprobs": True},
        {"min_tokens": "3"},
        {"min_tokens": 17},
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"top_p": "0.5"},
        {"min_p": [0.1]},
        {"stop": ("",)},
        {"stop": (5,)},
        {"stop": 5},
        {"stop": None},
        {"stop": {"a": 1}},
        {"stop_token_ids": ("a",)},
        {"stop_token_ids": 5},
        {"ignore_eos": "yes"},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: "more"}},
        {"logit_bias": [3]},
        {"logit_bias": None},
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises(UsageError, match=rf"sampling-invalid\]: {name} is [\s\S]*why:  expected ") as caught:
        SamplingParams(**params)
    assert f"{name}=" in caught.value.hint


def test_numbers_of_other_libraries_are_numbers() -> None:
    made = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), seed=2**80, stop=["a", "b"])  # type: ignore[arg-type]
    assert (made.max_tokens, made.stop) == (3, ("a", "b"))


def test_one_text_is_one_prompt_and_one_stop(llm: LLM) -> None:
    alone = llm.generate("hello", GREEDY)
    assert [out.token_ids for out in alone] == [llm.generate(["hello"], GREEDY)[0].token_ids]
    assert [len(scores) for scores in llm.score("hello")] == [4]
    assert [len(scores) for scores in llm.score(["", "a", [5, 6]])] == [0, 0, 1]
    text = alone[0].text
    as_text = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=text[4])  # type: ignore[arg-type]
    assert as_text.stop == (text[4],)
    out = llm.generate(["hello"], as_text)[0]
    assert (out.text, out.finish_reason) == (text[: text.index(text[4])], "stop")


@pytest.mark.parametrize("prompt", [None, 5, [1.5], ["a", "b"], [True], b"text", {"prompt": "text"}])
def test_a_prompt_that_is_none_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"a prompt is .*\n  why:  expected a string or token ids\n  hint: "):
        llm.generate([prompt])


@pytest.mark.parametrize("prompts", [None, 5, b"text", {"prompt": "text"}])
def test_prompts_that_are_none_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UsageError, match=r"prompts are .*\n  why:  expected a string, or a list of"):
        llm.generate(prompts)
    with pytest.raises(UsageError, match="texts are"):
        llm.score(prompts)


def test_the_prompt_that_cannot_run_is_named(llm: LLM) -> None:
    with pytest.raises(
        UsageError, match=r"prompt 1 cannot be run\n  why:  the prompt has no tokens\n  hint: "
    ):
        llm.generate(["hello", ""])
    with pytest.raises(UsageError, match=r"prompt 0 cannot be run\n  why:  token id -1 is outside"):
        llm.generate([[-1]])
    with pytest.raises(UsageError, match=r"prompt 0 cannot fit[\s\S]*or raise max_model_len"):
        llm.generate([[5] * 600])
    assert not llm.core.has_unfinished()


@pytest.mark.parametrize("sampling", [5, "greedy", {"temperature": 0}, [None]])
def test_sampling_that_is_none_is_refused(llm: LLM, sampling: Any) -> None:
    with pytest.raises(UsageError, match="expected one SamplingParams for all prompts"):
        llm.generate("hello", sampling)
    with pytest.raises(UsageError, match="2 sampling parameters for 1 prompts"):
        llm.generate("hello", [GREEDY, GREEDY])


def test_conversations_are_answered_through_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert llm.core.tokenizer is not None
    expected = llm.generate([llm.core.tokenizer.encode_chat(talk)], GREEDY)[0].token_ids
    assert [out.token_ids for out in llm.chat(talk, GREEDY)] == [expected]
    assert [out.token_ids for out in llm.chat([talk, talk], GREEDY)] == [expected, expected]
    assert llm.chat([]) == []


@pytest.mark.parametrize("messages", ["text", 5, None, {"role": "user"}, [5], ["hi"], [{"content": "hi"}]])
def test_messages_that_are_none_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a list of messages: \[\{"):
        llm.chat(messages)


def test_halves_of_surrogate_pairs_are_refused(llm: LLM) -> None:
    for wrong in (
        lambda: llm.generate("a\ud800"),
        lambda: llm.score(["a\ud800"]),
        lambda: llm.chat([{"role": "user", "content": "\udcff"}]),
    ):
        with pytest.raises(UsageError, match=r"not valid Unicode\n  why:  character \d+ is a lone surrogate"):
            wrong()


@pytest.mark.parametrize(("path", "device"), [(5, "cpu"), (None, "cpu"), ("m", 5), ("m", None)])
def test_places_of_the_wrong_kind_are_refused(path: Any, device: Any) -> None:
    with pytest.raises(UsageError, match=r"(path|device) is (5|None)\n  why:  expected the directory"):
        LLM(path, device)


def test_hints_speak_python(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivery.device.gpu_count", lambda: 0)
    with pytest.raises(EnvironmentLacking, match="no NVIDIA GPU can be used") as lacking:
        LLM(tiny_checkpoint, device="cuda")
    assert 'device="cpu")' in lacking.value.hint
    assert "--" not in lacking.value.hint
    with pytest.raises(UsageError, match=r"exceeds the model.s maximum length") as long:
        LLM(tiny_checkpoint, max_model_len=10**6)
    assert long.value.hint == "max_model_len=512"


@pytest.mark.parametrize(
    "option",
    [
        {"block_size": "64"},
        {"max_model_len": 2.5},
        {"seed": "x"},
        {"wait_time_ms": -1.0},
        {"ageing_s": 0.0},
        {"cache_max_entry_count": float("inf")},
        {"max_num_seqs": True},
    ],
)
def test_options_of_the_wrong_kind_are_refused_by_name(tiny_checkpoint: Path, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=f"{name} is"):
        LLM(tiny_checkpoint, **option)


def test_closing_frees_what_the_engine_held_and_further_use_is_refused(tiny_checkpoint: Path) -> None:
    with LLM(tiny_checkpoint) as engine:
        engine.generate(["hello"], GREEDY)
        held = weakref.ref(engine.core._runner)
    gc.collect()
    assert held() is None
    with pytest.raises(UsageError, match="engine is closed"):
        engine.generate(["hello"])
    with pytest.raises(UsageError, match="engine is closed"):
        engine.score(["hello"])
    engine.close()


def test_a_sequence_outside_the_vocabulary_is_not_scored(llm: LLM) -> None:
    beyond = llm.core.config.vocab_size
    with pytest.raises(UsageError, match="cannot be scored"):
        llm.score([[5, beyond]])
    with pytest.raises(UsageError, match="cannot be scored"):
        next(llm.logits([-1]))
    assert llm.stats().kv_usage_ratio == 0.0


def test_two_sequences_are_not_scored_at_once(llm: LLM) -> None:
    first, second = llm.logits([1, 2, 3] * 100), llm.logits([4, 5, 6] * 100)
    right = next(first)
    with pytest.raises(UsageError, match="logits of another one have not been read"):
        next(second)
    first.close()
    assert next(llm.logits([1, 2, 3] * 100)).equal(right)
    assert llm.stats().kv_usage_ratio == 0.0
