"""Parts of the evaluation: what is evaluated, what is counted, crops, robustness, the report and all plots."""
