"""What an ONNX graph must pass before it is written: the gate, the rules for its nodes, the real images."""
