"""Put the start-up file into this checkout's environment, and into nobody else's wheel."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

START_UP_FILE = "msdg-vllm-torch-companions.pth"


class StartUpFileHook(BuildHookInterface[Any]):
    """Adds the file to an editable install, which is what the set-up makes.

    Python runs it at interpreter start; msdg_vllm/torch_companions.py says why.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds."""
        if version == "editable":
            build_data["force_include_editable"][f"scripts/{START_UP_FILE}"] = START_UP_FILE
