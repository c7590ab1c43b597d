"""How many kinds of tokens share a route, and so the weights of one expert.

    c = (y_1, ..., y_m)                                    a token's composition of features     (1)
    p(c | r) = fraction of composition c among the tokens on route r                             (2)
    N_eff(r) = 1 / sum_c p(c | r)^2                        1 if there is one composition, at most |C| (3)
    mean over routes = sum_r mass(r) N_eff(r),             mass(r) the fraction of tokens on r   (4)

MH-MoE (arXiv 2602.12587) eq. 3, 8, 9 and figure 4. The features used here need no labels: the token's frequency and its
position. A route is one expert of one head (`per_expert`), or the combination that all heads selected (`per_path`).
"""
# Shape suffixes: T tokens, H heads, K experts a head, V vocabulary, C compositions, N paths.

from collections.abc import Sequence

import torch
from torch import Tensor


def frequency_buckets(count_V: Tensor, num_buckets: int) -> Tensor:
    """Assign every token id to a bucket, (V,), most frequent first; buckets hold about equally many occurrences."""
    order_V = count_V.argsort(descending=True, stable=True)
    count_V = count_V[order_V].double()
    middle_V = (count_V.cumsum(0) - count_V / 2) / count_V.sum().clamp_min(1.0)
    bucket_V = torch.empty_like(order_V)
    bucket_V[order_V] = (middle_V * num_buckets).long().clamp_max(num_buckets - 1)
    return bucket_V


def position_buckets(length: int, num_buckets: int) -> Tensor:
    """Assign every position of a sequence to a bucket by its relative position, (length,)."""
    return torch.arange(length) * num_buckets // max(length, 1)


def composition(features: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Encode eq. (1) as one integer in [0, product of `sizes`), where feature i lies in [0, sizes[i])."""
    combined = torch.zeros_like(features[0])
    for feature, size in zip(features, sizes, strict=True):
        combined = combined * size + feature
    return combined


def per_expert(selected_HKT: Tensor, composition_T: Tensor, num_compositions: int) -> Tensor:
    """Count each expert's tokens by composition, (H, K, C) float64; counts of chunks of a stream add up."""
    one_hot_TC = torch.nn.functional.one_hot(composition_T, num_compositions).double()  # float32 is exact to 2^24
    return selected_HKT.double() @ one_hot_TC


def per_path(selected_HKT: Tensor, composition_T: Tensor, num_compositions: int) -> Tensor:
    """Count each path's tokens by composition, (N, C) float64, with a row for each path that occurred."""
    paths_TX, path_T = torch.unique(selected_HKT.flatten(0, 1).T, dim=0, return_inverse=True)
    flat_T = composition([path_T, composition_T], [len(paths_TX), num_compositions])
    return torch.bincount(flat_T, minlength=len(paths_TX) * num_compositions).view(-1, num_compositions).double()


def effective_number(count: Tensor) -> Tensor:
    """Compute eq. (3) over the last dimension, from counts; 0 for a route without tokens."""
    count = count.double()
    total, squares = count.sum(-1), count.square().sum(-1)
    return torch.where(total > 0, total.square() / squares, 0.0)


def mean_effective_number(count: Tensor) -> Tensor:
    """Compute eq. (4) over all routes, a scalar, from counts with C as the last dimension."""
    mass = count.sum(-1)
    return (mass * effective_number(count)).sum() / mass.sum().clamp_min(1.0)
