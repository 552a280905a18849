"""Parts of the training loop: setup from a recipe, checkpoints, the run's folder and log, several processes."""
