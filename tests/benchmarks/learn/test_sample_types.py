"""Sample types of training records."""

from benchmarks.learn.sample_types import with_sample_types
from benchmarks.learn.suite import Metric, Suite, TaskSegment
from streamlearn.settings import LearnerSettings


def test_tasks_with_labels_and_texts_get_different_types() -> None:
    """The type follows the record's task, also in a mixture; test records get none."""
    answers = {"mood": ["good", "bad"] * 3, "tale": [f"story {i}" for i in range(6)]}
    train = {
        task: tuple({"prompt": "?", "completion": a, "meta": {"task": task}} for a in found)
        for task, found in answers.items()
    }
    metrics: dict[str, Metric] = {"mood": "exact_match", "tale": "rouge_l"}
    mixture = TaskSegment(("mood", "tale"), (train["tale"][0], train["mood"][0], {"text": "of no task"}))
    suite = Suite("s", (mixture,), {"mood": train["mood"][:1]}, train=train, metrics=metrics)
    typed = with_sample_types(suite, LearnerSettings(sample_types=("label", "text")))
    assert [record.get("sample_type") for record in typed.segments[0].records] == ["text", "label", None]
    assert typed.tests == suite.tests
