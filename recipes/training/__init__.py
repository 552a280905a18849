"""Parts of the training loop: what a recipe asks for, checkpoints, the run's folder and log, several processes."""
