"""Tasks of lm-evaluation-harness on our engine, where the package is installed (`pip install lm-eval`).

The harness asks a model for log-likelihoods of continuations and for greedy text; both are answered by an
`LLM`. Of a task's numbers the share of right answers is kept.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError, EnvironmentLacking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delivery.engine import LLM

_SHARES = ("acc", "exact_match", "pass@1")
"""Names of the share of right answers, the first that a task has counts."""
_NEW_TOKENS = 256


def check_installed() -> None:
    """Raises EnvironmentLacking `harness-missing`."""
    if find_spec("lm_eval") is None:
        raise EnvironmentLacking(
            "harness-missing",
            "tasks of lm-evaluation-harness are requested, but it is not installed",
            hint="pip install lm-eval",
        )


def installed_version() -> str:
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        return "absent"


def run_tasks(llm: LLM, tasks: Sequence[str], limit: int, done: Callable[[str], None]) -> dict[str, Any]:
    """Task → {"questions", "right"}; `right` is the share of right answers times the questions.

    tasks: names that the harness knows, or paths of its YAML files. limit: questions a task, 0 for all.
    Raises EnvironmentLacking `harness-missing`, DataError `harness-no-share`.
    """
    check_installed()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folders = sorted({str(Path(t).resolve().parent) for t in tasks if t.endswith((".yaml", ".yml"))})
    names = [Path(t).stem if t.endswith((".yaml", ".yml")) else t for t in tasks]
    manager = TaskManager(include_path=folders or None)
    out = {}
    for name in names:
        found = simple_evaluate(
            model=_model(llm),
            tasks=[name],
            limit=limit or None,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager,
        )
        questions = int(found["n-samples"][name]["effective"])
        out[name] = {"questions": questions, "right": _share(name, found["results"][name]) * questions}
        done(name)
    return out


def _share(task: str, results: dict[str, Any]) -> float:
    """`acc,none` and its like; the part behind the comma names a filter."""
    for wanted in _SHARES:
        for key, value in results.items():
            if key.partition(",")[0] == wanted:
                return float(value)
    raise DataError(
        "harness-no-share",
        f"the task {task} reports no accuracy",
        why=f"it measures {', '.join(k for k in results if ',' in k)}",
        hint=f"a task with one of {', '.join(_SHARES)}",
    )


def _model(llm: LLM) -> Any:
    """An `lm_eval.api.model.TemplateLM` that asks `llm`."""
    import torch
    from lm_eval.api.model import TemplateLM

    from delivery.engine import SamplingParams

    tokenizer: Any = llm.core.tokenizer
    longest = llm.core.max_model_len

    class EngineModel(TemplateLM):  # type: ignore[misc, unused-ignore]
        @property
        def eot_token_id(self) -> int:
            return int(next(iter(llm.core.eos_token_ids)))

        @property
        def tokenizer_name(self) -> str:
            return "deliver"

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return list(llm.encode(string))

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return str(
                tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)
            )

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [_continuation(context, wanted) for _, context, wanted in requests]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            texts = [request.args[0] for request in requests]
            return [_continuation([self.eot_token_id], self.tok_encode(text))[0] for text in texts]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            prompts, sampling = [], []
            for context, how in (request.args for request in requests):
                until = how.get("until") or []
                tokens = int(how.get("max_gen_toks", _NEW_TOKENS))
                ids = self.tok_encode(context)
                prompts.append(ids[-max(longest - tokens, 1) :])
                sampling.append(
                    SamplingParams(
                        max_tokens=tokens,
                        temperature=float(how.get("temperature") or 0.0),
                        stop=tuple([until] if isinstance(until, str) else until),
                    )
                )
            return [made.text for made in llm.generate(prompts, sampling)]

    def _continuation(context: Sequence[int], wanted: Sequence[int]) -> tuple[float, bool]:
        """Log-probability in nats of `wanted` after `context`, and whether greedy decoding gives it."""
        ids = [*context, *wanted][-longest:]
        first, total, greedy = max(len(ids) - len(wanted), 1), 0.0, True
        at = 0
        for piece in llm.logits(ids):
            start, end = max(first - 1 - at, 0), min(len(piece), len(ids) - 1 - at)
            if start < end:
                targets = torch.tensor(ids[at + start + 1 : at + end + 1], device=piece.device)
                scores = torch.log_softmax(piece[start:end].float(), dim=-1)
                total += float(scores.gather(1, targets[:, None]).sum())
                greedy = greedy and bool((scores.argmax(dim=-1) == targets).all())
            at += len(piece)
        return total, greedy

    return EngineModel()
