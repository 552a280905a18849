"""Published besides the weights: model cards, and our results compared with those of the papers."""
