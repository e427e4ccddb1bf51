"""The layers of a network, one file for each algorithm."""
