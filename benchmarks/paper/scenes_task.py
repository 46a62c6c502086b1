"""Generated scenes as an lmms-eval task: to see that the plumbing works, without a download.

The task is for the bundled model and belongs to no table of the paper.
"""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.paper.published import Setting, Table
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.questions import ask_one_of_each
from benchmarks.quality.scenes import sample_scene

NUM_SCENES = 8
TASK = "msdg_scenes"

SCENES = Table(
    name="scenes",
    label="not in the paper",
    title="Check of the plumbing on generated scenes",
    model="models/scenes-llava",
    architecture="LlavaForConditionalGeneration",
    encoder=None,
    columns=("scenes",),
    retentions=(0.111,),
    served={"Ours": Setting(), "pool": Setting("pool")},
)

# lmms-eval finds functions by module; JSON is YAML too.
_TASK_FILE = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: generate_until
doc_to_visual: !function benchmarks.paper.scenes_task.doc_to_visual
doc_to_text: !function benchmarks.paper.scenes_task.doc_to_text
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 8
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
metadata:
  version: 1.0
"""


def write_task(folder: Path, num_scenes: int = NUM_SCENES) -> Path:
    """Write pictures, questions and the task file; return the folder for lmms-eval to include."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / "questions.jsonl"
    with questions.open("w", encoding="utf-8") as lines:
        for number in range(num_scenes):
            scene = sample_scene(number, "test")
            picture = folder.resolve() / f"{number}.png"
            draw_scene(scene).save(picture)
            for asked in ask_one_of_each(scene):
                line = {"image": str(picture), "question": asked.text, "answer": asked.answer}
                lines.write(json.dumps(line) + "\n")
    task = _TASK_FILE.format(task=TASK, questions=json.dumps(str(questions.resolve())))
    (folder / f"{TASK}.yaml").write_text(task, encoding="utf-8")
    return folder


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image]:
    return [Image.open(doc["image"]).convert("RGB")]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: object = None) -> str:
    return str(doc["question"])
