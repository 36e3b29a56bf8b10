"""CPU kernels: programs of operations compiled by numba and run by a few threads.

`layer` and `program` are the interface; nothing is compiled before it is used.
"""
