"""A page in the browser to play with a model: ``capszoo app`` (extra ``app``), and the same as a Hub Space.

``capszoo.app.model`` computes answers: the exported file in ONNX Runtime for the scores, ``capszoo.explain`` for the
couplings, the decoder for reconstructions. ``capszoo.app.page`` is the Gradio page, ``capszoo.app.space`` writes a
Space.
"""
