"""The version, which `msdg_vllm/__init__.py` alone decides, in every file that must repeat it.

python -m deploy.version    # after the version was changed there
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msdg_vllm

ROOT = Path(__file__).resolve().parent.parent

# What stands before the number in files that no build fills in.
_REPEATED = {
    "CITATION.cff": r"^version: ",
    "Dockerfile": r"image\.version=\"",
    "deploy/kubernetes/Chart.yaml": r"^(?:version: |appVersion: \")",
    "docs/server.md": r"\"LlavaForConditionalGeneration\", \"version\": \"",
}
_NUMBER = r"\d+\.\d+\.\d+(?:\w*)"


def outdated(version: str = msdg_vllm.__version__) -> Iterator[tuple[Path, str]]:
    """Yield each file that names another version, with the text it should have."""
    for name, before in _REPEATED.items():
        path = ROOT / name
        text = path.read_text()
        filled, count = re.subn(f"({before}){_NUMBER}", rf"\g<1>{version}", text, flags=re.M)
        if not count:
            raise ValueError(f"{name} has no version after {before}")
        if filled != text:
            yield path, filled


def main() -> None:
    """Write the version into all of them."""
    for path, text in outdated():
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {msdg_vllm.__version__}")


if __name__ == "__main__":
    main()
