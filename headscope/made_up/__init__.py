"""Made-up inputs, one file for each kind: each adds what a model's forward asks of its kind, from its configuration."""
