"""The demo's rebuilt tokenizer against llama.cpp's own tokenisation of the same file.

Needs llama.cpp: `pip install cyllama` has it built, where `llama-cpp-python` compiles for ten minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizer_samples import SAMPLE

from delivery.checkpoint import Tokenizer
from delivery.checkpoint.fetch.demo import fetch_demo
from delivery.checkpoint.gguf_source import GgufSource

TEXTS = [
    SAMPLE,
    "The year 2024 had 366 days; 3.14159 is not 22/7.",
    "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\u3002\u4eca\u5929\u662f2024\u5e745\u67081\u65e5\u3002",
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u2014 \u0441\u0442\u043e\u043b\u0438\u0446\u0430",
    "for i in range(10):\n\tprint(i)  # tab\r\n",
    "I'll we're CAN'T  \u00a0 nbsp",
    "<|im_start|>user\nhi<|im_end|>\n",
]


# In a process of its own: the library's C code prints, and ends the process when it fails.
TOKENIZE = """
import json, sys
from cyllama.llama import llama_cpp
llama_cpp.ggml_backend_load_all()
llama_cpp.llama_backend_init()
model = llama_cpp.LlamaModel(sys.argv[1], llama_cpp.LlamaModelParams())
vocab = model.get_vocab()
print(json.dumps([list(vocab.tokenize(text, False, True)) for text in json.load(sys.stdin)]))
"""


@pytest.mark.slow
def test_same_tokens_as_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("cyllama")
    file = fetch_demo()
    for name, content in GgufSource(file).files().items():
        (tmp_path / name).write_bytes(content)
    ours = Tokenizer.open(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", TOKENIZE, str(file)],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
        check=True,
    )
    for text, expected in zip(TEXTS, json.loads(done.stdout), strict=True):
        assert ours.encode(text, add_special_tokens=False) == expected, text
