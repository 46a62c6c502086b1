"""Functions that tests send into the worker to watch a Qwen2.5-VL at work."""

from __future__ import annotations

from typing import Any


def watch_tower(model: Any) -> None:
    """Note the merged tokens of the items in every call of the vision tower from now on."""
    model.tower_calls = []
    if "forward" in model.visual.__dict__:
        return
    forward = model.visual.forward

    def noted(pixels: Any, grid_thw: Any, **kwargs: Any) -> Any:
        model.tower_calls.append(len(pixels) // model.visual.spatial_merge_unit)
        return forward(pixels, grid_thw, **kwargs)

    model.visual.forward = noted


def tower_calls(model: Any) -> list[int]:
    """How many merged tokens each call of the tower got since it is watched."""
    return list(model.tower_calls)


def record_states(model: Any) -> None:
    """Keep the states of every pruned item from now on."""
    model.recorded_states = []
    select_rows = type(model).select_rows

    def recorded(images: Any, *args: Any, **kwargs: Any) -> Any:
        for image in images:
            states = image.signals.states.items()
            model.recorded_states.append(
                {layer: state[0].numpy().copy() for layer, state in states}
            )
        return select_rows(model, images, *args, **kwargs)

    model.select_rows = recorded


def take_states(model: Any) -> Any:
    """The recorded states; nothing is recorded from now on."""
    del model.select_rows
    return model.__dict__.pop("recorded_states")


def encoder_graph_modalities(model: Any) -> list[str]:
    """Modalities for which encoder CUDA graphs would be captured on a GPU."""
    return list(model.get_encoder_cudagraph_config().modalities)
