"""The Hopper kernels, compiled without a card: they assemble, stay in registers, keep products in flight.

A product that reads an operand from registers runs on while the warp computes; its registers must not be
written before the wait that covers it. The compiler does not check that, so the machine code is checked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("hopper_machine_code.py")


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("hopper_machine_code", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CODE = _load()
VARIANTS = [("w4", name) for name in CODE.W4] + [("stream", name) for name in CODE.STREAM]
VARIANTS += [("prefill", name) for name in CODE.PREFILL]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), VARIANTS)
def test_machine_code(kind: str, name: str) -> None:
    pytest.importorskip("triton.experimental.gluon")
    if kind == "prefill" and CODE.PREFILL[name]["LAYOUT"] != "auto":
        from delivery.kernels.gpu.prefill_hopper import SPILL_FREE

        if not SPILL_FREE:
            pytest.skip("this triton's assembler spills, and the operator takes another kernel")
    # A process of its own: the interpreter of the other tests replaces the compiler in this one.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), kind, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[0])
    assert found["products"] > 0
    # The assembler serialises the 16-bit stream without scales: slower than it could be, not wrong.
    assert found["serialized"] == [] or (kind, name) == ("stream", "bf16")
    assert found["overwritten"] == []
    assert found["spills"] == []
    assert found["shared_bytes"] <= 227 << 10


def test_the_check_sees_a_hazard() -> None:
    loop = [
        ".L_x_1:",
        "HADD2 R40, R2, R3 ;",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;",
        "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0 ;",
        "@P0 BRA `(.L_x_1) ;",
    ]
    assert CODE.overwritten_operands(loop) == ["HADD2 R40, R2, R3 ;"]
    loop[1], loop[2] = loop[2], loop[1]
    assert CODE.overwritten_operands(loop) == []
