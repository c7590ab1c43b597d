"""Evaluation of tasks on a tiny backbone."""

import pytest

from benchmarks.learn import evaluator as module
from benchmarks.learn.evaluator import AnswerBatch, Evaluator
from benchmarks.learn.suite import Json, Reference, Suite
from streamlearn.learner.evaluate import prompt_of, run_to_end
from streamlearn.learner.generate import decode
from tests.benchmarks.learn.decoders import LetterDecoder
from tests.learners import MakeLearner


def record(prompt: str, answer: str) -> Json:
    """Letters whose code points are in the tiny backbone's vocabulary."""
    return {"prompt": prompt, "completion": answer, "meta": {"task": "t"}}


TESTS = {
    "s": tuple(record(prompt, "!") for prompt in ("%", "$&$&", "&&&")),
    "t": tuple(record(prompt, "!!") for prompt in ("&$%%%%%%", "$")),
    "u": (record("%%", "!"),),
}
SUITE = Suite(
    "two",
    (),
    TESTS,
    references={"s": (Reference(("!",)),) * 3, "t": (Reference(("!!", "$")),) * 2},
    train={"s": (record("$", "!!!"), record("$", "!")), "t": (record("$", "!" * 200),)},
    metrics={"s": "exact_match", "t": "rouge_l"},
)


def test_scores_are_means_over_answer_tokens(make_learner: MakeLearner) -> None:
    """Accuracy is a share, loss is near that of a uniform guess."""
    found = Evaluator(SUITE, LetterDecoder()).evaluate(make_learner(preset="lora"), ["s"], lambda *_: None)["s"]
    assert 0 <= found.accuracy <= 1
    assert found.loss > 1


@pytest.mark.parametrize("tokens", [10, 10_000])
def test_answers_are_those_decoded_one_by_one(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Batches mix tasks; a task's training answers set its limit; without references there is no answer."""
    monkeypatch.setitem(module.ANSWER_BATCHES, "cpu", AnswerBatch(4, tokens))
    learner = make_learner(preset="streamlearn")
    evaluator = Evaluator(SUITE, LetterDecoder())
    slots = {"s": [0, 1, 0], "t": [1, 0], "u": [0]}
    found = evaluator.answer(learner, ["t", "u", "s"], lambda task, _: slots[task])
    assert list(found) == ["t", "s"]
    assert (found["s"].metric, found["t"].metric) == ("exact_match", "rouge_l")
    limits = {"s": 3, "t": module.MAX_NEW_TOKENS}
    for task, answers in found.items():
        assert len(answers.scores) == len(TESTS[task])
        for text, example, slot in zip(answers.texts, evaluator.tests[task], slots[task], strict=True):
            prompts = [prompt_of(example)]
            ids = decode(learner.model, prompts, [limits[task]], LetterDecoder().stop, learner.device, [slot])
            assert text == LetterDecoder().text(run_to_end(ids)[0]).strip()


def test_without_references_nothing_is_decoded(make_learner: MakeLearner) -> None:
    """A run without answers is a suite without references."""
    suite = Suite("s", (), TESTS)
    assert Evaluator(suite, LetterDecoder()).answer(make_learner(preset="lora"), ["s", "t"], lambda *_: None) == {}
