"""Errors, meshes, number formats, offsets and masks, gathers of rows, scales."""
