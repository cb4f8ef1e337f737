"""`Router`: which experts each token goes to, and with which weights."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, PRNGKeyArray

from ragged.core.errors import Site, describe, is_arraylike, is_count
from ragged.core.formats import accumulator_dtype, float_dtype
from ragged.core.sealed import sealed, unsealed

SCORES: dict[str, Callable[[Array], Array]] = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


class Routing(eqx.Module):
    """The experts of each token, with their weights.

    - `weights`: `[tokens, top_k]` floats.
    - `experts`: `[tokens, top_k]` integers.
    - `probabilities`: `[tokens, num_experts]` float32 with rows that sum to 1, or are 0 if all scores are, for
      `MoEStats.load_balance`; or None.
    - `logits`: `[tokens, num_experts]` float32, for `MoEStats.z`; or None.
    """

    weights: Float[Array, "tokens top_k"]
    experts: Int[Array, "tokens top_k"]
    probabilities: Float[Array, "tokens experts"] | None = None
    logits: Float[Array, "tokens experts"] | None = None


class Router(eqx.Module):
    """Chooses the `top_k` experts with the highest scores of each token.

        logits = x @ weight + bias                                         (float32)
        scores = score(logits)
        experts = top_k(scores + selection_bias)
        weights = scale * scores[experts] / (sum(scores[experts]) + epsilon)    (not divided without `normalize`)

    If the scores of all chosen experts are 0 in float32, their weights are 0, also with the default `epsilon=0`.
    A softmax over the chosen logits is the same as `score="softmax"` with `normalize=True`.

    **Fields:**

    - `weight`: `[d, num_experts]`.
    - `bias`: `(num_experts,)`, or None.
    - `selection_bias`: `(num_experts,)` float32, or None. It affects only the choice of experts, so it has no gradient,
      and no optimiser changes it: see `with_selection_bias`. In the pytree it is *sealed*: in a dtype that rejects
      arithmetic, and that NumPy and checkpoints don't support. So save `router.unsealed()`.

    The numbers of experts, groups and choices, and the options of `__init__`, are static.
    """

    weight: Float[Array, "d experts"]
    bias: Float[Array, " experts"] | None
    _selection_bias: Any  # sealed or unsealed
    top_k: int = eqx.field(static=True)
    score: str | Callable[[Array], Array] = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: tuple[int, int] | None = eqx.field(static=True)

    def __init__(
        self,
        d: int,
        num_experts: int,
        top_k: int,
        *,
        score: str | Callable[[Array], Array] = "softmax",
        use_bias: bool = False,
        use_selection_bias: bool = False,
        normalize: bool | None = None,
        epsilon: float = 0.0,
        scale: float = 1.0,
        groups: tuple[int, int] | None = None,
        dtype: Any = None,
        key: PRNGKeyArray,
    ) -> None:
        """Initialises `weight` uniformly in `±d ** -0.5`, in `dtype` (default float32), and biases with zeros.

        **Arguments:**

        - `d`, `num_experts`: extents of the weight.
        - `top_k`: number of experts of each token.
        - `use_bias`: whether there is a `bias`.
        - `use_selection_bias`: whether there is a `selection_bias`.
        - `key`: a key of `jax.random`, for the weight.
        - `score`: `"softmax"`, `"sigmoid"`, or a function from logits to scores, both `[tokens, num_experts]` float32.
        - `normalize`: whether the weights of a token are divided by their sum plus `epsilon`; by default, if `top_k` is
          2 or more. With `top_k=1` each weight is then 1, without `epsilon`, so the router has no gradient.
        - `scale`: a factor of all weights.
        - `groups`: `(num_groups, top_groups)`: experts are divided into consecutive groups of equal size, and only
          experts of the `top_groups` best groups are chosen. The score of a group is the sum of its two highest scores,
          with `selection_bias` (DeepSeek-V3, arXiv:2412.19437).

        **Raises:** `TypeError` for an invalid `dtype` or `normalize`; `ValueError` for invalid numbers, an unknown
        `score`, or groups without enough experts.
        """
        site = Site("ragged.nn.Router(d, num_experts, top_k)")
        if not is_count(d) or not is_count(top_k) or not is_count(num_experts) or top_k > num_experts:
            problem = f"`d` is {d!r}, `top_k` is {top_k!r} and `num_experts` is {num_experts!r}."
            site.fail(ValueError, problem, "All must be positive ints, and `top_k` at most `num_experts`.")
        if not callable(score) and score not in SCORES:
            site.fail(ValueError, f"unknown `score` {describe(score)}.", f"Pass one of {[*SCORES]}, or a function.")
        if groups is not None:
            valid = isinstance(groups, tuple) and len(groups) == 2 and all(map(is_count, groups))
            valid = valid and groups[1] <= groups[0] and num_experts % groups[0] == 0 and num_experts >= 2 * groups[0]
            if not valid or top_k > groups[1] * (num_experts // groups[0]):
                hint = (
                    "Pass a pair such as `(8, 4)`: groups of two experts or more, and `top_k` or more in those chosen."
                )
                site.fail(ValueError, f"`groups` is {groups!r}, with {num_experts} experts and `top_k={top_k}`.", hint)
        if not isinstance(normalize, bool | None):
            site.fail(TypeError, f"`normalize` is {describe(normalize)}.", "Pass True, False or None.")
        for name, number in (("epsilon", epsilon), ("scale", scale)):
            is_number = isinstance(number, int | float | np.number) and not isinstance(number, bool)
            if not is_number or not 0 <= number < np.inf:
                hint = "Pass a static number, 0 or more. An array isn't static."
                site.fail(ValueError, f"`{name}` is {describe(number)}.", hint)
        dtype, limit = float_dtype(site, jnp.float32 if dtype is None else dtype), d**-0.5
        self.weight = jax.random.uniform(key, (d, num_experts), dtype, -limit, limit)
        self.bias = jnp.zeros(num_experts, dtype) if use_bias else None
        self._selection_bias = sealed(jnp.zeros(num_experts)) if use_selection_bias else None
        self.top_k, self.score, self.groups = top_k, score, groups
        self.normalize = top_k > 1 if normalize is None else normalize
        self.epsilon, self.scale = float(epsilon), float(scale)

    @property
    def selection_bias(self) -> Float[Array, " experts"] | None:
        """A copy as float32."""
        return None if self._selection_bias is None else unsealed(self._selection_bias)

    def with_selection_bias(self, selection_bias: Float[Array, " experts"]) -> "Router":
        """The router with another `selection_bias`, as a step of load balancing computes it.

        **Raises:** `ValueError` unless it has one number per expert; in a stack of routers, for each router.
        """
        new = jnp.asarray(selection_bias, jnp.float32)
        if new.shape != (*self.weight.shape[:-2], self.weight.shape[-1]):
            site = Site("router.with_selection_bias(selection_bias)", {"selection_bias": selection_bias})
            site.fail(ValueError, f"there are {self.weight.shape[-1]} experts.", "Pass one number per expert.")
        return self._with(sealed(new))

    def unsealed(self) -> "Router":
        """The router with its `selection_bias` in float32, for checkpoints. It routes in the same way."""
        return self._with(self.selection_bias)

    def sealed(self) -> "Router":
        """The router with its `selection_bias` in a dtype that rejects arithmetic, as `__init__` makes it."""
        return self._with(sealed(self._selection_bias))

    def _with(self, selection_bias: Any) -> "Router":
        return eqx.tree_at(lambda router: router._selection_bias, self, selection_bias, is_leaf=lambda x: x is None)

    def __call__(self, x: Float[Array, "tokens d"]) -> Routing:
        """The routing of tokens `x`.

        **Raises:** `TypeError` or `ValueError` unless `x` is a floating array `[tokens, d]`.
        """
        return self.select(self.logits(x))

    def logits(self, x: Float[Array, "tokens d"]) -> Float[Array, "tokens experts"]:
        """`x @ weight + bias`, in float32, also on TPUs: rounded to bfloat16, tokens would choose other experts."""
        check_rows(Site("router.logits(x)", {"x": x}), "x", x, self.weight.shape[-2])
        logits = jnp.matmul(x.astype(jnp.float32), self.weight.astype(jnp.float32), precision="highest")
        return logits if self.bias is None else logits + self.bias.astype(jnp.float32)[None]

    def select(self, logits: Float[Array, "tokens experts"]) -> Routing:
        """The routing of tokens with these logits, which are cast to float32 if they are narrower."""
        site = Site("router.select(logits)", {"logits": logits})
        check_rows(site, "logits", logits, self.weight.shape[-1])
        logits = logits.astype(accumulator_dtype(logits.dtype))
        scores = SCORES[self.score](logits) if isinstance(self.score, str) else self.score(logits)
        if jnp.shape(scores) != logits.shape:
            hint = "Return one score for each logit."
            site.fail(ValueError, f"the result of `score` is {describe(scores)}.", hint)
        probabilities = scores if self.score == "softmax" else _normalized(scores, 0.0)
        experts = lax.top_k(lax.stop_gradient(self._ranks(logits, scores)), self.top_k)[1]
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if self.normalize and self.score == "softmax" and self.selection_bias is None and self.groups is None:
            weights /= jnp.sum(weights, axis=1, keepdims=True) + self.epsilon  # The largest weight is far from 0.
        elif self.normalize:
            weights = _normalized(weights, self.epsilon)
        return Routing(weights * self.scale if self.scale != 1 else weights, experts, probabilities, logits)

    def _ranks(self, logits: Array, scores: Array) -> Array:
        """`[tokens, num_experts]`: the numbers by which experts are chosen, the largest first."""
        bias = self.selection_bias
        if bias is None and self.groups is None and isinstance(self.score, str):
            return logits  # They have the scores' order, but fewer ties: different logits may round to equal scores.
        ranks = scores if bias is None else scores + bias[None]
        if self.groups is None:
            return ranks
        tokens, experts = ranks.shape
        by_group = ranks.reshape(tokens, self.groups[0], experts // self.groups[0])
        of_groups = jnp.sum(lax.top_k(by_group, 2)[0], axis=-1)
        best = lax.top_k(of_groups, self.groups[1])[1]  # [tokens, top_groups]
        is_best = jnp.any(best[:, :, None] == jnp.arange(self.groups[0], dtype=best.dtype)[None, None], axis=1)
        return jnp.where(is_best[:, :, None], by_group, -jnp.inf).reshape(ranks.shape)


def check_rows(site: Site, name: str, x: Any, width: int) -> None:
    """Raises unless `x` is a floating array `[tokens, width]`."""
    if not is_arraylike(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        hint = f"Pass one row per token, as an array [tokens, {width}]."
        site.fail(TypeError, f"`{name}` is not a floating array.", hint)
    if x.ndim != 2 or x.shape[1] != width:
        flat = f"Flatten its leading axes: `{name}.reshape(-1, {name}.shape[-1])`."
        hint = "Pass rows of this width." if x.ndim == 2 else flat
        site.fail(ValueError, f"`{name}` must be [tokens, {width}].", hint)


def _normalized(scores: Float[Array, "tokens top_k"], epsilon: float) -> Float[Array, "tokens top_k"]:
    """`scores / (sum(scores) + epsilon)`, or 0 if all scores are 0, or their sum is.

    JAX's derivative divides by the square of the sum, which may be 0 in float32. So the scores are first divided by a
    power of two, near the largest one. Subnormal scores count as 0.
    """
    largest = lax.stop_gradient(jnp.max(jnp.abs(scores), axis=1, keepdims=True))
    numbers = jnp.finfo(scores.dtype)
    # The largest numbers would be rounded to infinity, or to a power whose reciprocal XLA rounds to 0.
    nearest_power = jnp.minimum(lax.reduce_precision(largest, numbers.nexp, 0), 2.0 ** (int(numbers.maxexp) - 2))
    is_zero = nearest_power == 0
    unit = jnp.where(is_zero, 1, nearest_power)
    scaled = scores / unit
    total = jnp.sum(scaled, axis=1, keepdims=True) + epsilon / unit
    is_zero |= total == 0
    return jnp.where(is_zero, 0, scaled / jnp.where(is_zero, 1, total))
