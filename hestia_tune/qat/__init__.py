"""Prepare and convert models: the quantized linear, its shards under FSDP2, and the schedule."""
