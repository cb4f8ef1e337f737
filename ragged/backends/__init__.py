"""The backends, a folder each. `base` is their contract.

Backends don't import each other. `primitive.lowering` imports a backend when it first plans a product for it.
"""
