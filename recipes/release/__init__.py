"""What is published beside weights: model cards, and our results beside those of the papers."""
