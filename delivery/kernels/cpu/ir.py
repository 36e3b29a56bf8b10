"""LLVM building blocks of the CPU kernels: vectors, wide loads, atomics, and how each stored format decodes.

numba compiles loops well but does not expose vectors, so the inner loops are written as LLVM IR: 16
lanes at a time, which LLVM lowers to whatever the processor has (two AVX2 registers, one AVX-512, four
NEON). Addresses are int64; every load may be unaligned.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cached_property
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

_I = types.int64
KERNEL = types.void(_I, _I, _I)
"""Signature of an operation's functions: address of its slots, thread, piece."""
PRODUCTS_KERNEL = types.void(_I, _I, _I, _I, _I, _I)
"""Signature of a format's products: operation, thread, first and last feature, output and its stride."""


class Kernel:
    """A C function made of a Python one; compiled (or taken from numba's cache) when its address is asked."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function = function
        self._signature = signature

    @cached_property
    def address(self) -> int:
        self._compiled = cfunc(self._signature, cache=True)(self._function)
        return int(self._compiled.address)


def kernel(signature: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator: a function of int64 arguments as a Kernel."""
    return lambda function: Kernel(function, signature)


_X86 = platform.machine().lower() in ("x86_64", "amd64")
LANES = 16
CHUNK = 32
"""Weights of a row come in chunks of 32; rows are padded with zeros to whole chunks."""

F32, F16 = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
Builder = Any
Value = Any


def vector(kind: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


def const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def splat_const(kind: ir.Type, value: float, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def load(b: Builder, address: Value, kind: ir.Type) -> Value:
    """A value of any type at an int64 address."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def splat(b: Builder, scalar: Value, lanes: int = LANES) -> Value:
    """A scalar in every lane."""
    empty = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = b.insert_element(empty, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, empty, ir.Constant(vector(I32, lanes), [0] * lanes))


def call(b: Builder, name: str, result: ir.Type, arguments: list[Value], **options: Any) -> Value:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments, **options)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x · y + z, rounded once, of 8 or 16 floats."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def total(b: Builder, v: Value) -> Value:
    """The sum of 16 floats, in any order."""
    zero = ir.Constant(F32, -0.0)
    return call(b, "llvm.vector.reduce.fadd.v16f32", F32, [zero, v], fastmath=("reassoc",))


def total_i32(b: Builder, v: Value) -> Value:
    """The sum of int32."""
    return call(b, f"llvm.vector.reduce.add.v{v.type.count}i32", I32, [v])


def largest(b: Builder, x: Value, y: Value) -> Value:
    return call(b, "llvm.maxnum.v16f32", x.type, [x, y])


def smallest(b: Builder, x: Value, y: Value) -> Value:
    return call(b, "llvm.minnum.v16f32", x.type, [x, y])


def largest_of(b: Builder, v: Value) -> Value:
    return call(b, "llvm.vector.reduce.fmax.v16f32", F32, [v], fastmath=("nnan",))


def nearest(b: Builder, v: Value) -> Value:
    """Rounded to whole numbers, ties to even."""
    return call(b, "llvm.rint.v16f32", v.type, [v])


def exp(b: Builder, x: Value) -> Value:
    """e^x of 16 floats up to 88, relative error under 2e-7 (Cephes' polynomial); NaN of NaN.

    Below −87.3 it is about 1e-38.
    """
    least = splat_const(F32, -87.3)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    turns = nearest(b, b.fmul(x, splat_const(F32, 1.4426950408889634)))
    x = fma(b, turns, splat_const(F32, -0.693359375), x)
    x = fma(b, turns, splat_const(F32, 2.12194440e-4), x)
    y = splat_const(F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(b, y, x, splat_const(F32, c))
    y = fma(b, b.fmul(x, x), y, b.fadd(x, splat_const(F32, 1.0)))
    bits = b.shl(b.fptosi(turns, vector(I32)), splat_const(I32, 23))
    return b.bitcast(b.add(b.bitcast(y, vector(I32)), bits), vector(F32))


def multiply_add_pairs(b: Builder, x: Value, y: Value) -> Value:
    """int16 x, y [16] → int32 [8]: x0·y0 + x1·y1, x2·y2 + x3·y3, …"""
    if _X86:
        return call(b, "llvm.x86.avx2.pmadd.wd", vector(I32, 8), [x, y])
    wide = b.mul(b.sext(x, vector(I32)), b.sext(y, vector(I32)))
    nothing = ir.Constant(wide.type, ir.Undefined)
    even = b.shuffle_vector(wide, nothing, ir.Constant(vector(I32, 8), list(range(0, 16, 2))))
    odd = b.shuffle_vector(wide, nothing, ir.Constant(vector(I32, 8), list(range(1, 16, 2))))
    return b.add(even, odd)


def multiply_add_bytes(b: Builder, x: Value, y: Value) -> Value:
    """uint8 x, int8 y [32] → int16 [16]: x0·y0 + x1·y1, …; sums must fit."""
    if _X86:
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", vector(I16), [x, y])
    wide = b.mul(b.zext(x, vector(I16, 32)), b.sext(y, vector(I16, 32)))
    nothing = ir.Constant(wide.type, ir.Undefined)
    even = b.shuffle_vector(wide, nothing, ir.Constant(vector(I32), list(range(0, 32, 2))))
    odd = b.shuffle_vector(wide, nothing, ir.Constant(vector(I32), list(range(1, 32, 2))))
    return b.add(even, odd)


# How 16 weights from position k (int64) of a row at `row` become floats.


def _float32(b: Builder, row: Value, k: Value) -> Value:
    return load(b, b.add(row, b.mul(k, const(4))), vector(F32))


def _bfloat16(b: Builder, row: Value, k: Value) -> Value:
    bits = load(b, b.add(row, b.mul(k, const(2))), vector(I16))
    return b.bitcast(b.shl(b.zext(bits, vector(I32)), splat_const(I32, 16)), vector(F32))


def _float16(b: Builder, row: Value, k: Value) -> Value:
    return b.fpext(load(b, b.add(row, b.mul(k, const(2))), vector(F16)), vector(F32))


def _int8(b: Builder, row: Value, k: Value) -> Value:
    return b.sitofp(b.sext(load(b, b.add(row, k), vector(I8)), vector(I32)), vector(F32))


def _float8_e5m2(b: Builder, row: Value, k: Value) -> Value:
    bits = b.shl(b.zext(load(b, b.add(row, k), vector(I8)), vector(I16)), splat_const(I16, 8))
    return b.fpext(b.bitcast(bits, vector(F16)), vector(F32))


def _float8_e4m3(b: Builder, row: Value, k: Value) -> Value:
    # Sign, exponent and mantissa moved into a half's places give 2^-8 of the value: 15 − 7 in the bias.
    wide = b.zext(load(b, b.add(row, k), vector(I8)), vector(I16))
    sign = b.shl(b.and_(wide, splat_const(I16, 0x80)), splat_const(I16, 8))
    rest = b.shl(b.and_(wide, splat_const(I16, 0x7F)), splat_const(I16, 7))
    half = b.bitcast(b.or_(sign, rest), vector(F16))
    return b.fmul(b.fpext(half, vector(F32)), splat_const(F32, 256.0))


Decode = Callable[[Builder, Value, Value], Value]
DECODE: dict[str, Decode] = {
    "float32": _float32,
    "bfloat16": _bfloat16,
    "float16": _float16,
    "int8": _int8,
    "float8_e5m2": _float8_e5m2,
    "float8_e4m3fn": _float8_e4m3,
}


# Atomics, for the threads of a program.


@intrinsic
def atomic_add(_context: Any, address: Any, amount: Any) -> Any:
    """int64 at `address` += amount; the value before."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        return b.atomic_rmw("add", b.inttoptr(a[0], I64.as_pointer()), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def atomic_load(_context: Any, address: Any) -> Any:
    """int64 at `address`."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        return b.load_atomic(b.inttoptr(a[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), code


@intrinsic
def relax(_context: Any) -> Any:
    """A hint that this thread is waiting: its sibling on the same core gets the core meanwhile."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        if _X86:
            call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), code


# Scalars at int64 addresses.


def _reader(kind: ir.Type, result: Any, name: str) -> Any:
    @intrinsic
    def read(_context: Any, address: Any) -> Any:
        def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            return load(b, a[0], kind)

        return result(types.int64), code

    read.__name__ = name
    return read


read_f32 = _reader(F32, types.float32, "read_f32")
read_i64 = _reader(I64, types.int64, "read_i64")
read_i32 = _reader(I32, types.int32, "read_i32")


@intrinsic
def read_f16(_context: Any, address: Any) -> Any:
    """A float16 as float32."""

    def code(_context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        return b.fpext(load(b, a[0], F16), F32)

    return types.float32(types.int64), code


def _writer(value_type: Any, name: str) -> Any:
    @intrinsic
    def write(_context: Any, address: Any, value: Any) -> Any:
        def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
            store(b, a[1], a[0])
            return context.get_dummy_value()

        return types.void(types.int64, value_type), code

    write.__name__ = name
    return write


write_f32 = _writer(types.float32, "write_f32")
write_i16 = _writer(types.int16, "write_i16")


# Calls of compiled functions by address, so that each is compiled once and only where it is used.


@intrinsic
def call_kernel(_context: Any, address: Any, op: Any, thread: Any, piece: Any) -> Any:
    """Call a KERNEL."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        b.call(b.inttoptr(a[0], kind.as_pointer()), a[1:])
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I), code


@intrinsic
def call_products(
    _context: Any, address: Any, op: Any, thread: Any, n0: Any, n1: Any, out: Any, stride: Any
) -> Any:
    """Call a PRODUCTS_KERNEL."""

    def code(context: Any, b: Builder, _signature: Any, a: list[Value]) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
        b.call(b.inttoptr(a[0], kind.as_pointer()), a[1:])
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I, _I, _I), code
