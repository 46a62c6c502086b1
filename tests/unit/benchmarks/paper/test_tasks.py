"""Our own lmms-eval tasks: what their files say exists, and the scenes are what they should be."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import ImageChops

from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.evaluation import TASKS
from benchmarks.paper.scenes_task import doc_to_text, doc_to_visual, write_task
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.scenes import sample_scene


class _Loader(yaml.SafeLoader):
    """Reads `!function a.b.c` as the text `a.b.c`."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


def read_task(path: Path) -> dict[str, Any]:
    task: dict[str, Any] = yaml.load(path.read_text(), Loader=_Loader)
    return task


def functions_in(value: object) -> list[str]:
    if isinstance(value, dict):
        return [name for item in value.values() for name in functions_in(item)]
    if isinstance(value, list):
        return [name for item in value for name in functions_in(item)]
    return [value] if isinstance(value, str) and value.startswith("benchmarks.") else []


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("scenes"), num_scenes=2)


def test_a_task_file_is_named_as_its_task_and_measured_by_a_column(scenes: Path) -> None:
    own = {task for benchmark in BENCHMARKS.values() for task in benchmark.tasks}
    paths = [*TASKS.glob("*.yaml"), *scenes.glob("*.yaml")]
    assert {read_task(path)["task"] for path in paths} == {path.stem for path in paths}
    assert {path.stem for path in paths} == {task for task in own if task.startswith("msdg_")}


def test_every_function_of_ours_that_a_task_names_exists(scenes: Path) -> None:
    paths = [*TASKS.glob("*.yaml"), *scenes.glob("*.yaml")]
    names = [name for path in paths for name in functions_in(read_task(path))]
    assert len(names) == 3
    for name in names:
        module, function = name.rsplit(".", 1)
        assert callable(getattr(import_module(module), function))


def test_a_task_reports_the_metric_of_its_column(scenes: Path) -> None:
    reported = {
        path.stem: {metric["metric"] for metric in read_task(path)["metric_list"]}
        for path in [*TASKS.glob("*.yaml"), *scenes.glob("*.yaml")]
    }
    for benchmark in BENCHMARKS.values():
        for task in benchmark.tasks:
            assert set(benchmark.metrics) <= reported.get(task, set(benchmark.metrics))


def test_the_scenes_show_what_is_asked_about(scenes: Path) -> None:
    (path,) = scenes.glob("*.yaml")
    data = Path(read_task(path)["dataset_kwargs"]["data_files"]["test"])
    documents = [json.loads(line) for line in data.read_text().splitlines()]
    assert len({document["image"] for document in documents}) == 2
    first, last = documents[0], documents[-1]
    for number, document in ((0, first), (1, last)):
        (picture,) = doc_to_visual(document)
        drawn = draw_scene(sample_scene(number, "test"))
        assert ImageChops.difference(picture, drawn).getbbox() is None
    assert doc_to_text(first) == first["question"]
    assert all(document["answer"] for document in documents)
