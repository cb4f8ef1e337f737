"""`GroupedTensor`, what makes it and what is done with it besides products."""
