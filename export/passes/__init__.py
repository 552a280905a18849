"""Changes to a prepared model or its graph for a runtime."""
