"""Softmax attention: the core over q, k, v, and rotary positions."""
