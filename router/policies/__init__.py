"""Ways of choosing workers, one class each."""
