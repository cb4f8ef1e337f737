"""`explain`, `error_table`, serialisation for `jax.export`. No other subpackage imports them."""
