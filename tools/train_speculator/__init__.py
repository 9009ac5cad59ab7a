"""Training of heads that draft for a model: EAGLE-3 and Medusa."""
