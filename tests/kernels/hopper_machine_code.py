"""Compile the Hopper kernels for sm_90 without a card, and read their machine code.

python hopper_machine_code.py w4 one-row      prints what was found, as JSON
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hopper_hazards import hazards

W4 = {
    "one-row": {"BLOCK_M": 8},
    "one-row-scaled": {"BLOCK_M": 8, "SCALED": True},
    "16-rows": {"BLOCK_N": 128, "BLOCK_M": 16, "WARPS": 8, "REGISTERS": 80},
    "shared-k": {"BLOCK_M": 16, "SHARED_K": True, "DTYPE": "fp16"},
    "groups-of-64": {"BLOCK_M": 8, "GROUPS": 2},
    "groups-of-32": {"BLOCK_M": 8, "CHUNKS": 4, "GROUPS": 4},
    "64-rows": {"BLOCK_M": 64, "STAGES": 4, "SCALED": True, "REGISTERS": 128},
    "wide": {"BLOCK_N": 256, "BLOCK_M": 128, "STAGES": 3, "SCALED": True, "WARPS": 8, "REGISTERS": 168},
    "tall": {"BLOCK_N": 128, "BLOCK_M": 256, "STAGES": 3, "SCALED": True, "WARPS": 8, "REGISTERS": 168},
}
STREAM = {
    "int8": {"DTYPE": "i8"},
    "int8-large": {"DTYPE": "i8", "BLOCK_N": 128, "BLOCK_M": 256, "STAGES": 4, "WARPS": 8, "REGISTERS": 168},
    "int8-shared-k": {
        "DTYPE": "i8",
        "BLOCK_N": 128,
        "BLOCK_M": 128,
        "STAGES": 4,
        "WARPS": 8,
        "REGISTERS": 168,
        "SHARED_K": True,
    },
    "fp8": {"DTYPE": "fp8e4nv", "SHARED_K": True},
    "fp8-blocks": {"DTYPE": "fp8e5", "SCALES": "block"},
    "bf16": {"DTYPE": "bf16", "SCALES": "none"},
}

PREFILL = {
    "bf16": {"LAYOUT": "auto", "STAGES": 3, "CHOOSE": True, "SEQUENCES": 128},
    "few-sequences": {"LAYOUT": "auto", "STAGES": 3},
    "narrow-heads": {"LAYOUT": "auto", "HEAD_DIM": 64},
    "int8": {"LAYOUT": "int8", "PAGE": 32, "CHOOSE": True, "SEQUENCES": 128},
    "fp8": {"LAYOUT": "fp8", "CHOOSE": True, "SEQUENCES": 128},
    "int4": {"LAYOUT": "int4", "PAGE": 32},
}


def compiled_w4(**options: Any) -> Any:
    import triton.experimental.gluon.language as gl

    from delivery.kernels.gpu import w4_hopper

    dtype, warps, registers = (
        options.pop(k, d) for k, d in (("DTYPE", "bf16"), ("WARPS", 4), ("REGISTERS", 64))
    )
    n, m, chunks = options["BLOCK_N"], options["BLOCK_M"], options["CHUNKS"]
    x_layout = gl.NVMMASharedLayout(min(128, 256 // chunks), 16, 2)
    signature = {
        "w_desc": f"tensordesc<i32[{n // 2}, 32],{gl.NVMMASharedLayout(128, 32, 2)!r}>",
        "x_desc": f"tensordesc<{dtype}[{m}, {128 // chunks}],{x_layout!r}>",
        "s_desc": f"tensordesc<fp16[{n}],{gl.NVMMASharedLayout(0, 16, 1)!r}>",
        "z_desc": f"tensordesc<u8[{n}],{gl.NVMMASharedLayout(0, 8, 1)!r}>",
        **dict.fromkeys(("bias", "out"), f"*{dtype}"),
        "partial": "*fp32",
        "arrivals": "*i32",
        **dict.fromkeys(("M", "N", "N_PAD", "steps", "steps_per_split"), "i32"),
    }
    constants = {"SHARED_K": False, "GROUP_M": 16, "ZERO": True, "SCALED": False, "BIAS": False, **options}
    return compiled(w4_hopper._kernel, signature, constants, warps, registers)


def compiled_stream(**options: Any) -> Any:
    import triton.experimental.gluon.language as gl

    from delivery.kernels.gpu import stream_hopper

    dtype, warps, registers = (
        options.pop(k, d) for k, d in (("DTYPE", "i8"), ("WARPS", 4), ("REGISTERS", 64))
    )
    bits = 16 if dtype == "bf16" else 8
    layout = gl.NVMMASharedLayout(128, bits, 2)
    signature = {
        "w_desc": f"tensordesc<{dtype}[{options['BLOCK_N']}, {1024 // bits}],{layout!r}>",
        "x_desc": f"tensordesc<{dtype}[{options['BLOCK_M']}, {1024 // bits}],{layout!r}>",
        **dict.fromkeys(("w_scale", "x_scale", "partial"), "*fp32"),
        **dict.fromkeys(("bias", "residual", "out"), "*bf16"),
        "arrivals": "*i32",
        **dict.fromkeys(("M", "N", "steps", "steps_per_split", "block_columns"), "i32"),
    }
    constants = {
        "SHARED_K": False,
        "GROUP_M": 16,
        "X_SCALE_STRIDE": 1,
        "BIAS": False,
        "RESIDUAL": False,
        **options,
    }
    return compiled(stream_hopper._kernel, signature, constants, warps, registers)


def compiled_prefill(**options: Any) -> Any:
    import triton.experimental.gluon.language as gl

    from delivery.kernels.gpu import prefill_hopper

    layout, head_dim = options.pop("LAYOUT"), options.pop("HEAD_DIM", 128)
    pages = f"tensordesc<bf16[64, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    strides = ("q_stride", "out_stride", "table_stride", "block_stride", "scale_stride")
    signature = {
        **dict.fromkeys(("q", "out"), "*bf16"),
        **dict.fromkeys(("k_cache", "v_cache"), pages if layout == "auto" else "*i32"),
        **dict.fromkeys(("block_table", "query_start", "context_lens", "counter"), "*i32"),
        **dict.fromkeys((*strides, "first_row", "sequences", "tiles", "programs"), "i32"),
        "factor": "fp32",
    }
    constants = {
        "TOKEN_STRIDE": head_dim // 4,
        "HEAD_STRIDE": head_dim * 16,
        "GROUP": 4,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "PAGE": 64,
        "QUERIES": 32,
        "SEQUENCES": 16,
        "LAYOUT": prefill_hopper.FORMS[layout],
        "CHOOSE": False,
        "STAGES": 2,
        "OVERLAP": True,
        **options,
    }
    scales = dict.fromkeys(("k_scale", "v_scale"), "*fp32")
    if layout == "auto":
        constants |= dict.fromkeys(scales)
    else:
        signature |= scales
    even = ("q_stride", "out_stride", "block_stride", "scale_stride")
    return compiled(
        prefill_hopper._kernel,
        signature,
        constants,
        4,
        168,
        even,
        ("block_table", "query_start", "context_lens"),
    )


def compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    registers: int,
    even: tuple[str, ...] = (),
    uneven: tuple[str, ...] = (),
) -> Any:
    """`even`: integers that are multiples of 16, as the launcher finds out by itself."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if (kind[0] == "*" and name not in uneven) or name in even
        },
    )
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "maxnreg": registers}
    )


def findings(code: Any, folder: Path) -> dict[str, Any]:
    """What the assembler says and what the machine code shows."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembly, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    assembly.write_text(code.asm["ptx"])
    binary.write_bytes(code.asm["cubin"])
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", assembly, "-o", folder / "again.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True)
    listing = subprocess.run([tools / "nvdisasm", binary], capture_output=True, text=True, check=True).stdout
    lines = [re.sub(r"/\*[0-9a-fx]+\*/", "", line).strip() for line in listing.splitlines()]
    lines = [line for line in lines if line]
    return {
        "serialized": [x for x in (report.stdout + report.stderr).splitlines() if "serialized" in x],
        "shared_bytes": code.metadata.shared,
        "products": sum("GMMA" in line for line in lines),
        "spills": [line for line in lines if re.match(r"(@!?P\d+ )?(LDL|STL)\b", line)],
        "hazards": hazards(lines[lines.index(".text._kernel:") :]),
    }


def main(kind: str, name: str) -> None:
    if kind == "prefill":
        code = compiled_prefill(**PREFILL[name])
    elif kind == "w4":
        code = compiled_w4(**{"BLOCK_N": 64, "STAGES": 6, "CHUNKS": 2, "GROUPS": 1, **W4[name]})
    else:
        code = compiled_stream(**{"BLOCK_N": 64, "BLOCK_M": 8, "STAGES": 6, "SCALES": "row", **STREAM[name]})
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(findings(code, Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
