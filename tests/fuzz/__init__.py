"""Random programs of the whole library, compared with NumPy: `python -m tests.fuzz --minutes 10`."""
