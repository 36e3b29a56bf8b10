"""Ask a model the conversations of a smoke suite; compare its greedy tokens with another model's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from delivery.engine import LLM

    Message = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """The last answer of one conversation.

    raw: decoded with special tokens, without the one that ended it. prompt_ids: the conversation as the
    template wrote it, earlier answers included.
    """

    text: str
    raw: str
    finish_reason: str | None
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def ask(llm: LLM, conversations: Sequence[Sequence[Message]], max_tokens: Sequence[int]) -> list[Answer]:
    """Greedy answers; an assistant message without content is filled in by the model, turn by turn.

    All conversations run together; those with more open turns take part in further rounds.
    """
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    rest = [list(c) for c in conversations]
    answers: list[Answer | None] = [None] * len(conversations)
    open_ones = list(range(len(conversations)))
    while open_ones:
        for i in open_ones:
            while rest[i] and rest[i][0]["content"] is not None:
                message = rest[i].pop(0)
                histories[i].append({"role": str(message["role"]), "content": str(message["content"])})
        given = _generate(llm, [histories[i] for i in open_ones], [max_tokens[i] for i in open_ones])
        for i, answer in zip(open_ones, given, strict=True):
            answers[i] = answer
            histories[i].append({"role": "assistant", "content": answer.text.strip()})
            if rest[i]:
                rest[i].pop(0)
        # The last user message is answered too: a conversation ends when nothing is left to say.
        open_ones = [i for i in open_ones if rest[i]]
    return [a for a in answers if a is not None]


def open_turns(tokenizer: Any) -> int:
    """Assistant turns of a sample conversation that the chat template does not end, of two.

    After a finished answer a template writes a token that also ends generation, before the next message
    begins. Where it does not, the model never saw a turn end, and an engine cannot see one.
    """
    answers = ("It is seven.", "You are welcome.")
    messages = [
        {"role": "user", "content": "What is three plus four?"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "Thank you."},
        {"role": "assistant", "content": answers[1]},
        {"role": "user", "content": "Goodbye."},
    ]
    text = tokenizer.apply_chat_template(messages)
    ends = [tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_token_ids]
    following = [
        text.partition(answer)[2].partition(next_one)[0]
        for answer, next_one in zip(answers, ("Thank you.", "Goodbye."), strict=True)
    ]
    return sum(not any(end and end in after for end in ends) for after in following)


def time_runs(
    llm: LLM, prompt_ids: Sequence[int], tokens: int, runs: int, done: Callable[[], None]
) -> list[float]:
    """Milliseconds of `runs` generations of exactly `tokens` tokens, one after the other, after one more."""
    from delivery.engine import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    out = []
    for number in range(runs + 1):
        # Another first token each time, or the prefix cache would answer for the prompt.
        start = time.perf_counter()
        llm.generate([_unshared(llm, prompt_ids, number)], sampling)
        if number:
            out.append((time.perf_counter() - start) * 1e3)
            done()
    return out


def greedy_agreement(llm: LLM, answers: Sequence[Answer], done: Callable[[], None]) -> list[tuple[int, int]]:
    """(agreeing, all) output tokens per answer: `llm`'s likeliest token given the same tokens before it."""
    out = []
    for answer in answers:
        ids = [*answer.prompt_ids, *answer.token_ids]
        likeliest: list[int] = []
        for piece in llm.logits(ids):
            likeliest += piece.argmax(dim=-1).tolist()
        first = len(answer.prompt_ids)
        same = sum(likeliest[i - 1] == ids[i] for i in range(first, len(ids)))
        out.append((same, len(answer.token_ids)))
        done()
    return out


def _generate(
    llm: LLM, histories: Sequence[Sequence[Mapping[str, str]]], max_tokens: Sequence[int]
) -> list[Answer]:
    from delivery.engine import SamplingParams

    tokenizer: Any = llm.core.tokenizer
    prompts = [tokenizer.encode_chat(history) for history in histories]
    sampling = [SamplingParams(max_tokens=n, temperature=0.0) for n in max_tokens]
    ends = set(llm.core.eos_token_ids)
    out = []
    for prompt, made in zip(prompts, llm.generate(prompts, sampling), strict=True):
        shown = made.token_ids[:-1] if made.token_ids and made.token_ids[-1] in ends else made.token_ids
        out.append(
            Answer(
                text=made.text,
                raw=tokenizer.decode(shown, skip_special_tokens=False),
                finish_reason=made.finish_reason,
                prompt_ids=tuple(prompt),
                token_ids=tuple(made.token_ids),
            )
        )
    return out


def _unshared(llm: LLM, prompt_ids: Sequence[int], number: int) -> list[int]:
    vocabulary = llm.core.config.vocab_size
    return [(prompt_ids[0] + 7919 * (number + 1)) % vocabulary, *prompt_ids[1:]]
