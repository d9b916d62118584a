"""Translation: the command line, training, checkpoints, evaluation and the demo."""
