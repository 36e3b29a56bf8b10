"""Markers of chat templates in an output: the model, or its template, did not end the turn.

Special tokens are stripped from visible text, so outputs are looked at before that. Besides the model's
own special tokens the usual markers are known, because a template that was swapped brings foreign ones.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_USUAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<s>",
    "</s>",
)
# A role alone on its line, as templates write it: the model plays the user's part too.
_ROLE = re.compile(r"^(?:###\s*)?(?:user|assistant|system|human)\s*:?\s*$", re.IGNORECASE | re.MULTILINE)


def leaked_markers(raw: str, special_tokens: Iterable[str] = ()) -> list[str]:
    """Markers inside an output, in order of appearance, without the one that ended it.

    raw: the output decoded with special tokens kept; its ending token, if any, already removed.
    """
    known = {*_USUAL, *(t for t in special_tokens if len(t) > 2)}
    found = [(at, marker) for marker in known if (at := raw.find(marker)) >= 0]
    if role := _ROLE.search(raw):
        found.append((role.start(), role.group().strip()))
    return [marker for _, marker in sorted(found)]
