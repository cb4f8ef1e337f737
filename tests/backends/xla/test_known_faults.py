"""Programs that some versions of XLA's CPU backend compile wrongly, or that crash there: none that is supported does.

This is why jax 0.11.1 is the oldest supported version: jaxlib 0.10.2 and 0.11.0 crash, and 0.10.2 also computes wrong
numbers. Each program runs in a process of its own, because it may crash.
"""

import subprocess
import sys

import pytest

IMPORTS = ["import jax", "import jax.numpy as jnp", "import numpy as np"]
PROGRAMS = {
    # jax issue 39103: wrong numbers in jaxlib 0.10.2
    "a sum of squares of matrix-vector products": """
        n = 32_769
        x = jnp.zeros((n, 3)).at[:, 0].set(jnp.arange(n, dtype=jnp.float32))
        eye = jnp.eye(3)
        got = jax.jit(lambda x: jax.vmap(lambda row: jnp.sum((eye @ row) ** 2))(x))(x)
        want = np.arange(n, dtype=np.float64) ** 2
    """,
    # jax issue 39257: a crash or a hang in jaxlib 0.10.2 and 0.11.0
    "a sum of products of rank 8": """
        x, y = jnp.ones((10, 4, 6)), jnp.ones((10, 4, 6, 9, 9, 9, 9, 9))
        got = jax.jit(lambda x, y: jnp.log(jnp.sum(x[(..., *[None] * 5)] * y, axis=2)))(x, y)
        want = np.log(6.0)
    """,
    # jax issue 40412: a crash in jaxlib 0.10.2
    "a sum of products of rank 7 with an extent of 1": """
        x = jnp.ones((3, 1, 2, 2, 8, 8, 8))
        got = jax.jit(lambda x, y: jnp.sum(x * y, axis=3))(x, 2 * x)
        want = 4.0
    """,
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_plain_jax(name: str) -> None:
    lines = [*IMPORTS, *map(str.strip, PROGRAMS[name].splitlines()), "np.testing.assert_allclose(got, want, 1e-6)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
