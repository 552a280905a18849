"""Changes to a prepared model or its graph on the way to a runtime."""
