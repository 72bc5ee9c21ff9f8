"""Pointsman: a control plane for inference."""
