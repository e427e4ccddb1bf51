"""Small tools that all other folders use: random numbers, files, callbacks, wording, axes, the time left."""
