"""What computes products, a folder for each. `base` is the contract.

A backend imports `base`, `schedule`, a product's `operands`, and number formats; nothing of another backend, and
nothing that knows of `GroupedTensor`. Only `product.lowering` imports a backend.
"""
