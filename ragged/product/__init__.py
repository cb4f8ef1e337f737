"""Products: their layouts, what they are made of, the one JAX primitive under all of them, and what computes it.

`layout` and `operands` import nothing else of the library; backends import them. `lowering` and `primitive` are above
the backends, which `lowering` imports when a product is first planned for them. `check` is what public calls share.
"""
