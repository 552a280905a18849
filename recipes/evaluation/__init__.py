"""Parts of the evaluation: model and images, metrics, crops, robustness, the report and all plots."""
