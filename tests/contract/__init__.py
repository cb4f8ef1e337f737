"""The contract of products: properties that hold for any sizes, on each backend.

`programs` is the table of compiled programs, `draws` their sizes and buffers, `loop` the reference that they must
equal: a loop over groups in NumPy. `launches` counts the kernels that run.
"""
