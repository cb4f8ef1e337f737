"""The reference of a mixture of experts: NumPy, float64, one token after another, with the derivatives by hand."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Weights = dict[str, np.ndarray]
"""Of experts: "up" and "down", [experts, in, out], and maybe "gate"; with biases, "up bias", …, [experts, out]."""


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate * sigmoid(gate) * up


def slopes(function: Callable[..., np.ndarray], args: list[np.ndarray]) -> list[np.ndarray]:
    """The derivative of an elementwise function by each of its arguments: of a small step along the imaginary axis."""
    step = 1e-40
    return [np.imag(function(*(z + 1j * step * (i == j) for j, z in enumerate(args)))) / step for i in range(len(args))]


class Mixture(NamedTuple):
    """The result, and the gradients of `loss(y)`."""

    y: np.ndarray
    dx: np.ndarray
    dweights: np.ndarray
    dexperts: Weights
    dshared: Weights
    dgate: np.ndarray


def mixture(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    experts: Weights,
    function: Callable[..., np.ndarray] = swiglu,
    *,
    keep: np.ndarray | None = None,
    sent: np.ndarray | None = None,
    shared: Weights | None = None,
    shared_gate: np.ndarray | None = None,
    weigh_inputs: bool = False,
    slope: Callable[[np.ndarray], np.ndarray] = np.cos,
) -> Mixture:
    """`y[t]` is the sum of `weights[t, j] * expert[ids[t, j]](x[t])`; the gradients are of the sum of the sines of `y`,
    or of what else has this `slope`.

    An id that is no expert's has no row, nor has what isn't in `keep`. `sent`: what experts get in place of `x`.
    `weigh_inputs`: weights multiply what experts get.
    """
    rows = x if sent is None else sent
    y, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros(weights.shape)
    dexperts, dshared = ({name: np.zeros_like(w) for name, w in each.items()} for each in (experts, shared or {}))
    dgate = np.zeros(x.shape[1:])

    def expert(of: Weights, e: int, token: np.ndarray, factor: float, found: Weights) -> tuple[np.ndarray, Any]:
        """Of one token, and what its derivative is: by the token, and by a factor of the result."""
        ups = [name for name in ("gate", "up") if name in of]
        pre = [token @ of[name][e] + (of[f"{name} bias"][e] if f"{name} bias" in of else 0) for name in ups]
        hidden = function(*pre)
        out = hidden @ of["down"][e] + (of["down bias"][e] if "down bias" in of else 0)

        def pull(dout: np.ndarray) -> tuple[np.ndarray, float]:
            by_factor, dout = float(out @ dout), factor * dout
            cotangents = dict(zip(ups, [of["down"][e] @ dout * slope for slope in slopes(function, pre)], strict=True))
            for name, into, d in [("down", hidden, dout), *((name, token, d) for name, d in cotangents.items())]:
                found[name][e] += np.outer(into, d)
                if f"{name} bias" in found:
                    found[f"{name} bias"][e] += d
            return sum((of[name][e] @ d for name, d in cotangents.items()), np.zeros(token.shape)), by_factor

        return out, pull

    for t, chosen in enumerate(ids):
        terms = []
        for j, e in enumerate(chosen):
            if 0 <= e < len(experts["up"]) and (keep is None or keep[t, j]):
                w = weights[t, j]
                given, factor = (w * rows[t], 1.0) if weigh_inputs else (rows[t], w)
                out, pull = expert(experts, e, given, factor, dexperts)
                y[t] += factor * out
                terms.append((j, pull))
        gate = 1.0 if shared_gate is None else float(sigmoid(x[t] @ shared_gate))
        pull_shared = None
        if shared is not None:
            out, pull_shared = expert(shared, 0, x[t], gate, dshared)
            y[t] += gate * out
        dy = slope(y[t])
        for j, pull in terms:
            dtoken, by_factor = pull(dy)
            if weigh_inputs:
                by_factor, dtoken = float(dtoken @ rows[t]), weights[t, j] * dtoken
            dweights[t, j] += by_factor
            dx[t] += dtoken
        if pull_shared is not None:
            dtoken, by_factor = pull_shared(dy)
            dx[t] += dtoken
            if shared_gate is not None:
                by_gate = by_factor * gate * (1 - gate)
                dgate += by_gate * x[t]
                dx[t] += by_gate * shared_gate
    return Mixture(y, dx, dweights, dexperts, dshared, dgate)


def kept(
    ids: np.ndarray, experts: int, ways: int, capacity: int, devices: int, chunks: int = 1, slots: bool = False
) -> np.ndarray:
    """Which rows a capacity keeps. In each chunk of the tokens, each of the `ways` devices that share the experts takes
    rows in rounds: the first row of each of its experts from each sender, then the second one. `slots`: it takes as
    many of each sender."""
    keep, tokens, local = np.zeros(ids.shape, bool), len(ids) // devices, experts // ways
    for first, chunk, to in itertools.product(range(0, devices, ways), range(chunks), range(ways)):
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by expert and sender, in the order of tokens
        for expert, sender in itertools.product(range(to * local, (to + 1) * local), range(first, first + ways)):
            begin, end = (sender * tokens + tokens * i // chunks for i in (chunk, chunk + 1))
            rows[expert, sender] = [(begin + t, j) for t, j in np.argwhere(ids[begin:end] == expert)]
        pools = [[sender] for sender in range(first, first + ways)] if slots else [range(first, first + ways)]
        for senders in pools:
            found = [each for (_, sender), each in rows.items() if sender in senders]
            rounds = [each[i] for i in range(tokens * ids.shape[1]) for each in found if i < len(each)]
            for t, j in rounds[: capacity // chunks // (ways if slots else 1)]:
                keep[t, j] = True
    return keep


class Chosen(NamedTuple):
    """The routing of one token, and its derivative: from those of weights, probabilities and logits to logits."""

    experts: np.ndarray
    weights: np.ndarray
    probabilities: np.ndarray
    logits: np.ndarray
    pull: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def chosen(router: Any, token: np.ndarray, score: Callable[[np.ndarray], np.ndarray]) -> Chosen:
    """The published equations of a `ragged.nn.Router`, whose scores are softmax or the elementwise `score`."""
    weight, bias, selection = (
        np.zeros(1) if each is None else np.asarray(each, np.float64)
        for each in (router.weight, router.bias, router.selection_bias)
    )
    logits, is_softmax = token @ weight + bias, router.score == "softmax"
    scores = np.exp(logits - logits.max()) if is_softmax else score(logits)
    scores = scores / scores.sum() if is_softmax else scores
    ranks = scores + selection
    if router.groups is not None:
        count, best = router.groups
        of_groups = ranks.reshape(count, -1)
        worst = np.argsort(-np.sort(of_groups)[:, -2:].sum(1))[best:]
        of_groups = np.where(np.isin(np.arange(count), worst)[:, None], -np.inf, of_groups)
        ranks = of_groups.reshape(-1)
    experts = np.argsort(-ranks)[: router.top_k]
    picked = scores[experts]
    total = picked.sum() + router.epsilon if router.normalize else 1.0
    probabilities = scores / scores.sum()

    def pull(dweights: np.ndarray, dprobabilities: np.ndarray, dlogits: np.ndarray) -> np.ndarray:
        dscores = (dprobabilities - dprobabilities @ probabilities) / scores.sum()
        each = router.scale * dweights
        dscores[experts] += (each - (each @ picked / total if router.normalize else 0)) / total
        if is_softmax:
            return dlogits + scores * (dscores - dscores @ scores)
        return dlogits + dscores * slopes(score, [logits])[0]

    return Chosen(experts, router.scale * picked / total, probabilities, logits, pull)
