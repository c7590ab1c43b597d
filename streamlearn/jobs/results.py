"""What each job returns, as served and as the OpenAPI document shows it."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Frozen; unknown fields refused; a field's docstring is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ExampleResult(Body):
    """One example's part of an eval."""

    loss: float
    """Mean over the example's scored tokens, nats per token."""
    tokens: int
    """Tokens that were scored."""
    output: str | None = None
    """What was generated, when asked for."""


class EvalResult(Body):
    """The model at one step, measured on the request's examples."""

    step: int
    """Updates that the model had seen."""
    examples: int
    """Examples measured."""
    tokens: int
    """Tokens that were scored."""
    loss: float
    """Mean over all scored tokens, nats per token."""
    perplexity: float
    """exp(loss)."""
    token_accuracy: float
    """Share of scored tokens that were the most probable one, 0 to 1."""
    exact_match: float | None = None
    """Share of generated answers that equal the example's, 0 to 1; null without generate."""
    rouge_l: float | None = None
    """Mean ROUGE-L F1 of the generated answers, 0 to 1; null without generate."""
    per_example: tuple[ExampleResult, ...]
    """In the request's order."""
    seconds: float
    """Time spent on the job, waiting not included."""


class GenerateResult(Body):
    """What the model wrote."""

    step: int
    """Updates that the model had seen."""
    text: str
    """The continuation, without the prompt."""
    tokens: int
    """Tokens added."""
    seconds: float
    """Time spent on the job, waiting not included."""


class SnapshotResult(Body):
    """A snapshot that is durable now."""

    name: str
    """Its folder's name."""
    step: int
    """Updates that it holds."""


class ExpertsOfRegime(Body):
    """What one regime has to do with the experts of a layer; rows are heads, columns experts."""

    regime: int
    """Its number."""
    similarity: list[list[float]] | None = None
    """CKA of each expert with the regime's transient expert, 0 to 1; null when it was not probed."""
    claimed: list[list[int]] | None = None
    """Experts of each head that it may use; null when it may use all."""
    holdout_tokens: list[list[int]] | None = None
    """Tokens of its hold-out records that each expert gets now; null when it has none."""


class LayerExperts(Body):
    """The experts beside one linear; rows are heads, columns experts."""

    layer: str
    """The linear's name in the backbone."""
    load: list[list[int]] | None
    """Tokens that each was trained on (sequences where those are routed); null where nothing is routed."""
    share: list[list[float]] | None
    """The same as a part of its head's, 0 to 1."""
    importance: list[list[float]] | None
    """Mean importance of its weights, which the anchors hold it by; null where nothing is held."""
    effective_number: list[list[float]] | None = None
    """Kinds of tokens that share it (MH-MoE eq. 9), from 1 to `compositions`; 0 for one that got none."""
    mean_effective_number: float | None = None
    """Over all experts, by the tokens that they got."""
    regimes: tuple[ExpertsOfRegime, ...]
    """Those that are remembered, by number."""


class ExpertsResult(Body):
    """The experts at one step."""

    step: int
    """Updates that the model had seen."""
    layers: tuple[LayerExperts, ...]
    """In the backbone's order."""
    holdout_records: int
    """Records over which tokens and effective numbers were taken."""
    holdout_tokens: int
    """Their tokens."""
    compositions: int
    """Kinds of tokens that are told apart: by frequency and by position."""
    unmeasured: str | None
    """Why effective numbers are null; null when they are there."""
    seconds: float
    """Time spent on the job, waiting not included."""


Result = EvalResult | GenerateResult | SnapshotResult | ExpertsResult
