"""The gateway: serves several models on one port."""
