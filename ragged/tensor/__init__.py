"""`GroupedTensor` (fields, arithmetic, slices, conversions, annotations) and routes from tokens to groups."""
