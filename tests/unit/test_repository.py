"""The repository keeps its shape: small files, arrows that point down, nothing of one machine."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from tests.lanes import LANES

ROOT = Path(__file__).parents[2]
PACKAGES = ("msdg_vllm", "server", "benchmarks", "training", "deploy")
MAX_LINES = 350

MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def layer_of(module: str) -> str:
    """Return the folder a module of ours belongs to, `msdg_vllm` for those directly in it."""
    parts = module.split(".")
    if parts[0] != "msdg_vllm":
        return parts[0]
    is_folder = len(parts) > 1 and (ROOT / "msdg_vllm" / parts[1]).is_dir()
    return f"msdg_vllm.{parts[1]}" if is_folder else "msdg_vllm"


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it is loaded, as absolute names.

    Imports inside functions are left out: they are how `register()` stays cheap.
    """
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend(ast.iter_child_nodes(node))


def layers_below(layer: str) -> set[str]:
    """Return the layers of ours that the files of `layer` import."""
    paths = [path for path in MODULES if layer_of(_module_name(path)) == layer]
    names = {name for path in paths for name in imports_of(path)}
    return {layer_of(name) for name in names if name.split(".")[0] in PACKAGES} - {layer}


def test_the_layers_do_not_form_a_circle() -> None:
    layers = {layer_of(_module_name(path)) for path in MODULES}
    graph = {layer: layers_below(layer) for layer in layers}
    tuple(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    ("layer", "allowed"),
    [
        ("msdg_vllm", {"msdg_vllm.core", "msdg_vllm.methods"}),
        ("msdg_vllm.core", set()),
        ("msdg_vllm.methods", {"msdg_vllm.core"}),
        (
            "benchmarks",
            {
                # The simulator of loads runs the server's own controller.
                *("server", "msdg_vllm", "msdg_vllm.calibration"),
                *("msdg_vllm.core", "msdg_vllm.methods"),
            },
        ),
        (
            "training",
            {
                *("benchmarks", "msdg_vllm", "msdg_vllm.calibration"),
                *("msdg_vllm.core", "msdg_vllm.methods"),
            },
        ),
        ("msdg_vllm.calibration", {"msdg_vllm", "msdg_vllm.core", "msdg_vllm.methods"}),
        ("deploy", {"msdg_vllm", "msdg_vllm.core"}),
    ],
)
def test_a_layer_imports_only_what_is_below(layer: str, allowed: set[str]) -> None:
    assert layers_below(layer) <= allowed


@pytest.mark.parametrize("layer", ["msdg_vllm.engine", "msdg_vllm.models"])
def test_the_engine_knows_nothing_of_http(layer: str) -> None:
    assert not layers_below(layer) & {"server", "benchmarks"}


@pytest.mark.parametrize("layer", ["msdg_vllm.core", "msdg_vllm.methods"])
def test_the_method_needs_only_torch_and_the_standard_library(layer: str) -> None:
    paths = [path for path in MODULES if layer_of(_module_name(path)) == layer]
    written_in_triton = set((ROOT / "msdg_vllm/core/kernels").glob("[!_]*.py"))
    for path in paths:
        roots = {name.split(".")[0] for name in imports_of(path)} - sys.stdlib_module_names
        allowed = {"torch", "msdg_vllm"} | ({"triton"} if path in written_in_triton else set())
        assert roots <= allowed, path


def test_the_shared_modules_do_not_load_vllm() -> None:
    for path in (ROOT / "msdg_vllm").glob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & {"vllm", "transformers"}, path.name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_modules_of_sibling_rooms_have_names_of_their_own() -> None:
    homes: dict[tuple[Path, str], list[Path]] = {}
    for path in MODULES:
        if not path.stem.startswith("__"):
            homes.setdefault((path.parent.parent, path.stem), []).append(path.relative_to(ROOT))
    assert [paths for paths in homes.values() if len(paths) > 1] == []


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "tests" / "unit").glob("*/**/test_*.py")),
    ids=lambda path: str(path.relative_to(ROOT / "tests")),
)
def test_a_test_stands_where_the_code_stands_that_it_imports(path: Path) -> None:
    room = path.relative_to(ROOT / "tests" / "unit").parent
    homes = [home / room for home in (ROOT, ROOT / "msdg_vllm") if (home / room).is_dir()]
    assert homes, f"there is no folder {room}"
    home = layer_of(".".join(homes[-1].relative_to(ROOT).parts))
    product = ("msdg_vllm.", "server.")
    if f"{home}.".startswith(product):
        ours = [f"{name}." for name in imports_of(path) if f"{name}.".startswith(product)]
        assert not ours or any(name.startswith(f"{home}.") for name in ours)


def test_no_file_names_a_machine_or_a_registry(tracked_texts: dict[str, str]) -> None:
    # Written in two parts, or this file would name them itself.
    forbidden = ["/" + "work/", "/" + "root/", "/" + "Users/", "pypi" + ".org", "python" + "hosted"]
    found = [
        (name, word) for name, text in tracked_texts.items() for word in forbidden if word in text
    ]
    assert found == []


def test_the_address_of_pytorchs_index_has_one_home(tracked_texts: dict[str, str]) -> None:
    address = "download." + "pytorch.org"
    assert [name for name, text in tracked_texts.items() if address in text] == [
        "scripts/environment.py"
    ]


def test_the_hosted_checks_are_those_of_make_on_every_python() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    commands, pythons = set(), set()
    for job in workflow["jobs"].values():
        matrix = job["strategy"]["matrix"]
        pythons |= set(matrix.get("python", ()))
        for step in job["steps"]:
            if command := re.match(r"make (\S+|\$\{\{ matrix.tier \}\})", step.get("run", "")):
                commands |= {command[1]} if command[1] in targets else set(matrix["tier"])
    everything = re.search(r"^test: (.+?) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert everything
    tiers = {f"test-{Path(folder).name}" for lane in LANES for folder in lane}
    assert commands == {"setup", *everything[1].split(), *tiers}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}


def test_every_make_command_in_the_documents_exists(tracked_texts: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, text in tracked_texts.items():
        if name.endswith(".md"):
            # Commands stand in code spans or start a line of a code block.
            named = set(re.findall(r"(?:`|^\s*\$?\s*)make ([a-z][a-z-]*)", text, re.MULTILINE))
            assert named <= targets, name


def test_every_path_in_the_documents_exists(tracked_texts: dict[str, str]) -> None:
    folders = "|".join((*PACKAGES, "docs", "examples", "models", "scripts", "tests"))
    missing = []
    for name, text in tracked_texts.items():
        if name.endswith(".md"):
            here = (ROOT / name).parent
            links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
            missing += [(name, link) for link in links if not (here / link).exists()]
            for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
                # A page about the package may leave its name out; what runs write is not here.
                homes = (ROOT, ROOT / "msdg_vllm")
                if "/runs" not in path and not any((home / path).exists() for home in homes):
                    missing.append((name, path))
    assert missing == []


@pytest.fixture(scope="module")
def tracked_texts() -> dict[str, str]:
    """The text of every file under version control, by its path in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listing.stdout.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content:
            texts[name] = content.decode()
    return texts


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
