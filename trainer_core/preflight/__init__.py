"""Checks and reports before a model is loaded: plan, sizes, memory, disk."""
