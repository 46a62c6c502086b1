"""A run that was stopped goes on, and an answer is never taken for that of something else."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks.quality.answers import Answers, key_of

FACTS = {"weights": "a", "question": "Is there a sign?", "method": "msdg", "retention": "1/9"}


def test_answers_are_there_after_a_restart(tmp_path):
    Answers(tmp_path / "runs" / "answers.jsonl").add("k", {"answer": "yes"})
    assert Answers(tmp_path / "runs" / "answers.jsonl").get("k") == {"key": "k", "answer": "yes"}


def test_half_a_line_left_by_a_kill_is_asked_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    Answers(path).add("first", {"answer": "yes"})
    with path.open("a") as file:
        file.write('{"key": "second", "answ')
    answers = Answers(path)
    assert len(answers) == 1
    answers.add("second", {"answer": "no"})
    reread = Answers(path)
    found = [reread.get(key) for key in ("first", "second")]
    assert [answer["answer"] for answer in found if answer] == ["yes", "no"]


def test_many_threads_may_add_at_once(tmp_path):
    answers = Answers(tmp_path / "answers.jsonl")
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: answers.add(str(n), {"answer": "x" * 500}), range(300)))
    assert len(Answers(tmp_path / "answers.jsonl")) == 300


def test_every_fact_is_part_of_the_key():
    keys = {key_of({**FACTS, name: "other"}) for name in FACTS}
    assert len(keys | {key_of(FACTS)}) == len(FACTS) + 1
    assert key_of(dict(reversed(FACTS.items()))) == key_of(FACTS)
