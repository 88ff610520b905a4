"""Attention kernels over block tables: arrays in, arrays out, no knowledge of the engine that calls them.

Each operation has its own folder, with a `reference` that is slow and obviously right and that every other
implementation is tested against.
"""
