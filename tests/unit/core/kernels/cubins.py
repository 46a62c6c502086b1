"""Compile launches that were recorded without data to machine code for GPUs that are not there."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from msdg_vllm.core.kernels import Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPE_NAMES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Variant:
    """A kernel with all that decides its machine code."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # places of arguments that are multiples of 16
    num_warps: int

    @property
    def name(self) -> str:
        """The kernel and its constants, short."""
        shown = [f"{key}={value}" for key, value in self.constants]
        return f"{self.kernel.fn.__name__}[{', '.join(shown)}]"


@dataclass(frozen=True)
class Resources:
    """What a program of a kernel occupies."""

    registers: int  # per thread
    shared_bytes: int
    spilled_bytes: int  # per thread


def variant_of(launch: Launch) -> Variant:
    """Return what Triton would compile for a launch."""
    given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    signature, constants, aligned = [], [], []
    for place, parameter in enumerate(launch.kernel.params):
        value = given[parameter.name]
        is_free = parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not is_free):
            signature.append((parameter.name, "constexpr"))
            constants.append((parameter.name, value))
        elif isinstance(value, Tensor):
            signature.append((parameter.name, TYPE_NAMES[value.dtype]))
            aligned.append(place)
        else:
            signature.append((parameter.name, "i32" if isinstance(value, int) else "fp32"))
            if isinstance(value, int) and value % 16 == 0 and not is_free:
                aligned.append(place)
    return Variant(
        launch.kernel, tuple(signature), tuple(constants), tuple(aligned), given["num_warps"]
    )


def compile_for(variant: Variant, capability: int) -> Resources:
    """Compile a kernel for a GPU's compute capability, such as 80."""
    compiled = triton.compile(
        ASTSource(
            fn=variant.kernel,
            signature=dict(variant.signature),
            constexprs=dict(variant.constants),
            attrs={(place,): [["tt.divisibility", 16]] for place in variant.aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.num_warps},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(found["REG"], compiled.metadata.shared, found["STACK"] + found["LOCAL"])
