"""The worker, which handles tensors. Only this package imports torch."""
