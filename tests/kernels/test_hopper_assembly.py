"""The Hopper kernels, compiled without a card: they assemble, stay in registers, keep products in flight.

A product runs on while the warp computes; before the wait that covers it, its operand in registers must not
be written, nor its sums be read. The compiler does not check that, so the machine code is checked.
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


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


HAZARDS = _load(SCRIPT.with_name("hopper_hazards.py"))
CODE = _load(SCRIPT)
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
    assert found["serialized"] == []
    assert found["hazards"] == []
    assert found["spills"] == []
    assert found["shared_bytes"] <= 227 << 10


LOOP = """
.L_x_1:
LDS.128 R40, [R10+UR4] ;
HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
@P0 BRA `(.L_x_1) ;
WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
F2FP.BF16.F32.PACK_AB R13, R25, R24 ;
EXIT ;
"""


def changed(before: str, after: str) -> list[str]:
    assert before in LOOP
    return LOOP.replace(before, after).strip().splitlines()


def test_the_check_sees_operands_that_are_overwritten() -> None:
    # Going round, the operand of the product before is written again while that may still run.
    load = "LDS.128 R40, [R10+UR4] ;"
    assert HAZARDS.hazards(changed("", "")) == [load]
    wait_for_all = changed("gsb0, 0x1 ;", "gsb0, 0x0 ;")
    assert HAZARDS.hazards(wait_for_all) == []
    in_turn = changed(load, "MOV R50, R40 ;")
    assert HAZARDS.hazards(in_turn) == []


def test_the_check_sees_sums_that_are_read_too_early() -> None:
    sums = changed("WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\nF2FP", "F2FP")
    assert "F2FP.BF16.F32.PACK_AB R13, R25, R24 ;" in HAZARDS.hazards(sums)
    others = changed(
        "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\nF2FP.BF16.F32.PACK_AB R13, R25, R24", "FADD R1, R28, R23"
    )
    assert not any(line.startswith("FADD") for line in HAZARDS.hazards(others))


@pytest.mark.parametrize(
    ("line", "written", "read"),
    [
        ("LDG.E.64 R10, desc[UR4][R2.64+0x8] ;", {10, 11}, {2, 3}),
        ("STG.E.128 desc[UR4][R2.64], R8 ;", set(), {2, 3, 8, 9, 10, 11}),
        ("IMAD.WIDE.U32 R4, R6, R7, R8 ;", {4, 5}, {6, 7, 8}),
        ("LOP3.LUT P0, R5, R6, 0xf, R7, 0x80, !PT ;", {5}, {6, 7}),
        ("ISETP.GE.AND P0, PT, R9, R3, PT ;", set(), {9, 3}),
    ],
)
def test_what_an_instruction_touches(line: str, written: set[int], read: set[int]) -> None:
    assert HAZARDS.touched(line) == (written, read)
