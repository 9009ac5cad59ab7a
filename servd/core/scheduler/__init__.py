"""The scheduler: which requests compute which tokens in the next step."""
