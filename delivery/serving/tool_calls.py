"""Tool calls in generated text.

Templates of the Hermes, Qwen and SmolLM2 kind ask for a JSON object with `name` and `arguments` between
`<tool_call>` and `</tool_call>`.
Text that is not such a call stays text: nothing is guessed.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text without its tool calls, and the calls as the OpenAI API returns them."""
    calls = []

    def take(match: re.Match[str]) -> str:
        call = _parse(match.group(1))
        if call is None:
            return match.group(0)
        calls.extend(call)
        return ""

    rest = _CALL.sub(take, text)
    return (rest.strip() if calls else text), calls


def _parse(body: str) -> list[dict[str, Any]] | None:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    entries = data if isinstance(data, list) else [data]
    if not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries):
        return None
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {
                "name": entry["name"],
                "arguments": json.dumps(entry.get("arguments", {}), ensure_ascii=False),
            },
        }
        for entry in entries
    ]
