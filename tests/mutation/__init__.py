"""Mutation testing: puts small errors into a copy of the library, one at a time, and runs the tests that reach them."""
