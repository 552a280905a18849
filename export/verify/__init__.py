"""Verification of an ONNX graph before it is written: the gate, the rules for its nodes, the real images."""
