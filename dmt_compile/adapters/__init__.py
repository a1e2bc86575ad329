"""The only place that knows optional libraries. Nothing here imports them before a model or a batch of theirs appears."""
