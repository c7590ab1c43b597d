"""The diagonal of the empirical Fisher information matrix, a measure of importance.

    F = mean over records of (d log p(answer | prompt) / d theta)^2                            (1)

(1) needs the gradient of each single record; the squared gradient of a batch mean is a different quantity. log p is the
sum over the answer tokens, so that a record with a long answer weighs far more than one with a label:

    F <- F / mean F, the mean over all parameters                                              (2)

gives every task the same weight, as Schwarz et al. 2018 do for online EWC.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamlearn.adapters.context import routing_context
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import Example


def fisher(learner: Learner, examples: Sequence[Example]) -> list[Tensor]:
    """Return eq. (1) for each parameter of the optimizer, in its order."""
    parameters = learner.optimizer.parameters()
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    for example in examples:
        packed = pack([example], learner.device)
        with torch.enable_grad(), routing_context(learner.model, packed.context()):
            log_likelihood = packed_loss(learner.forward, packed).mean * len(packed.target_L)
        gradients = torch.autograd.grad(log_likelihood, parameters)
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient, value=1 / len(examples))
    return squares


def normalised(information: Sequence[Tensor]) -> list[Tensor]:
    """Return eq. (2); unchanged if all information is zero."""
    mean = torch.stack([each.sum() for each in information]).sum() / sum(each.numel() for each in information)
    return [each / mean if mean > 0 else each for each in information]
