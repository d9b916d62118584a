"""Private helpers: checks of arguments, PyTorch's private parts, timing, progress, signals."""
