"""Headers that say what answered a request."""

from urllib.parse import quote


def answer_headers(model: str, regime: int | None, score: float) -> dict[str, str]:
    """The model that answered, the likeliest regime of the prompt, and how well that explains it, 0 to 1.

    Names of models are percent-encoded where a header cannot hold them.
    """
    headers = {"x-streamlearn-model": quote(model, safe="/:@+,=~ "), "x-streamlearn-score": repr(score)}
    return headers if regime is None else {**headers, "x-streamlearn-regime": str(regime)}
