"""What is decided for a machine without a compiler, or with little memory free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import MemoryNodeInfo

from server import machine
from server.launcher import make_parser
from server.machine import GIB, fit_machine, has_compiler, unsaid, weight_bytes

ROOT = Path(__file__).parents[3]
BUNDLED = [str(ROOT / "models" / name) for name in ("scenes-llava", "scenes-qwen")]

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the GPU build is installed")


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_parser()


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a compiler."""
    return {"PATH": str(tmp_path)}


@pytest.fixture
def equipped(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a compiler."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "g++").touch(mode=0o755)
    return {"PATH": str(folder)}


def fitted(parser: Any, environment: dict[str, str], *options: str) -> Any:
    parsed = parser.parse_args(options, unsaid())
    fit_machine(parsed, parser, environment)
    return parsed


def test_the_compiler_is_the_one_that_torch_looks_for(
    bare: dict[str, str], equipped: dict[str, str]
) -> None:
    assert not has_compiler(bare)
    assert has_compiler(equipped)
    assert not has_compiler({**equipped, "CXX": "clang++"})


@pytest.mark.parametrize("model", BUNDLED)
def test_a_bundled_model_is_never_compiled(
    parser: Any, bare: dict[str, str], equipped: dict[str, str], model: str
) -> None:
    assert fitted(parser, bare, "--model", model).enforce_eager
    assert fitted(parser, equipped, "--model", model).enforce_eager


def test_another_model_is_compiled_where_there_is_a_compiler(
    parser: Any, bare: dict[str, str], equipped: dict[str, str]
) -> None:
    assert fitted(parser, bare, "--model", "owner/name").enforce_eager is True
    assert fitted(parser, equipped, "--model", "owner/name").enforce_eager is False


def test_the_operators_word_on_compilation_counts(
    parser: Any, bare: dict[str, str], equipped: dict[str, str]
) -> None:
    model = ("--model", BUNDLED[0])
    assert not fitted(parser, equipped, *model, "--no-enforce-eager").enforce_eager
    config = '{"mode": 3}'
    assert not fitted(parser, equipped, *model, "--compilation-config", config).enforce_eager
    with pytest.raises(ValueError, match="apt install g"):
        fitted(parser, bare, *model, "--no-enforce-eager")


@pytest.mark.parametrize("model", BUNDLED)
@pytest.mark.parametrize(("free", "kv"), [(20.0, 1.0), (2.0, 0.5), (1.0, 0.25)])
def test_a_bundled_models_kv_cache_is_bounded_by_what_is_free(
    monkeypatch: pytest.MonkeyPatch, parser: Any, model: str, free: float, kv: float
) -> None:
    _pretend_memory(monkeypatch, total=24, available=free)
    assert fitted(parser, {}, "--model", model).kv_cache_memory_bytes == kv * GIB


def test_another_model_gets_what_other_programs_leave(
    monkeypatch: pytest.MonkeyPatch, parser: Any, equipped: dict[str, str]
) -> None:
    _pretend_memory(monkeypatch, total=24, available=12)
    options = fitted(parser, equipped, "--model", "owner/name")
    assert options.gpu_memory_utilization == pytest.approx(0.45)
    assert options.kv_cache_memory_bytes is None


def test_on_an_idle_machine_another_model_gets_vllms_share(
    monkeypatch: pytest.MonkeyPatch, parser: Any, equipped: dict[str, str]
) -> None:
    default = parser.get_default("gpu_memory_utilization")
    _pretend_memory(monkeypatch, total=1000, available=1000 * default / 0.89)
    assert fitted(parser, equipped, "--model", "owner/name").gpu_memory_utilization == default


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--kv-cache-memory-bytes", "7"), {}),
        (("--gpu-memory-utilization", "0.5"), {}),
        ((), {"VLLM_CPU_KVCACHE_SPACE": "3"}),
    ],
)
def test_the_operators_word_on_memory_counts(
    parser: Any, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    untouched = parser.parse_args(["--model", BUNDLED[0], *options])
    parsed = fitted(parser, variables, "--model", BUNDLED[0], *options)
    assert parsed.kv_cache_memory_bytes == untouched.kv_cache_memory_bytes
    assert parsed.gpu_memory_utilization == untouched.gpu_memory_utilization


def test_what_is_not_decided_is_as_vllm_has_it(parser: Any) -> None:
    stock = vars(parser.parse_args(["--model", BUNDLED[0]]))
    ours = vars(fitted(parser, {}, "--model", BUNDLED[0]))
    changed = {name for name in stock if stock[name] != ours[name]}
    assert changed == {"enforce_eager", "kv_cache_memory_bytes", "use_tqdm_on_load"}


def test_a_folder_without_weights_is_of_unknown_size(tmp_path: Path) -> None:
    assert weight_bytes(str(tmp_path)) is None
    assert weight_bytes("owner/name") is None
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert weight_bytes(str(tmp_path)) == 5


def _pretend_memory(monkeypatch: pytest.MonkeyPatch, total: float, available: float) -> None:
    memory = MemoryNodeInfo(int(total * GIB), int(available * GIB))
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node: memory)


def test_a_path_with_a_space_is_preloaded_by_another_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    library = tmp_path / "a clone" / "torch" / "lib" / "libgomp.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(torch, "__file__", str(library.parents[1] / "__init__.py"))
    environment = {"LD_PRELOAD": "libother.so"}
    machine.preload_past_spaces(environment)
    other, link = environment["LD_PRELOAD"].split(":")
    assert other == "libother.so"
    assert " " not in link
    assert Path(link).resolve() == library
    machine.preload_past_spaces(environment)
    assert environment["LD_PRELOAD"] == f"{other}:{link}"
