"""Trains scheduled models under other trainers than Megatron's, each in its own words."""
