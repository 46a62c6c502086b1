"""What a caller may import, named one by one: a name that comes or goes is a decision."""

from types import ModuleType

import msdg_vllm


def test_the_package_offers_these_names_and_no_others() -> None:
    assert msdg_vllm.__all__ == ["ARCHITECTURES", "__version__", "register"]
    public = {
        name
        for name, value in vars(msdg_vllm).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public | {"__version__"} == set(msdg_vllm.__all__)
