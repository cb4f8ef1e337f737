"""`GroupedTensor`, what makes it, and what is done with it besides products.

Imports number formats, scalings and the arithmetic of sizes (`backends.schedule`); of products nothing but `Scales`.
"""
