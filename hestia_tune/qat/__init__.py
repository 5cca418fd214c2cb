"""Prepare and convert, the quantized linear, its shards under FSDP2, and the schedule."""
