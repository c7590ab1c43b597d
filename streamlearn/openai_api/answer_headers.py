"""Headers that say what answered a request."""

from urllib.parse import quote


def answer_headers(model: str, regime: int | None, score: float | None) -> dict[str, str]:
    """The model that answered, the likeliest regime of the prompt, and how well that explains it, 0 to 1.

    Names of models are percent-encoded where a header cannot hold them. What is None has no header.
    """
    headers = {"x-streamlearn-model": quote(model, safe="/:@+,=~ ")}
    if score is not None:
        headers["x-streamlearn-score"] = repr(score)
    if regime is not None:
        headers["x-streamlearn-regime"] = str(regime)
    return headers
