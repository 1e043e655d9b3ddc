"""Holds what code keeps between calls in Python, outside of its modules' tensors, to put it back."""
