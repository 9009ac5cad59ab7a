"""The worker room: tensors. The only place that imports torch."""
