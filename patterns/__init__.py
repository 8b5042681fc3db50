"""The fusions: one file per family, each matching the backward of an op in the joint graph."""
