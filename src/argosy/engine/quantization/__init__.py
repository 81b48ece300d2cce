"""Quantization of a checkpoint with calibration, and the measurement of its quality.

`quantize_model` reads the text (`calibration_text`) and quantizes layer by layer (`model_quantizer`). It writes a
compressed-tensors checkpoint (`checkpoint_writer`), and compares it with the original (`quality_measurement`).
`layer_pair` computes the inputs of each linear layer, and `weight_rounding` rounds its weight.
"""
