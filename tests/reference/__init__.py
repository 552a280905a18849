"""Naive versions of every algorithm: one loop per index, float64, written from the papers to be read."""
