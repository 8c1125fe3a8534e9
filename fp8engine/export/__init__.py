"""FP8 checkpoints and ONNX graphs of models: fe.hf (hf.py) and fe.onnx (onnx.py) have the public names."""
