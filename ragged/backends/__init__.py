"""What computes products, a folder for each: nothing in here knows of `GroupedTensor`. See `base` for the contract."""
