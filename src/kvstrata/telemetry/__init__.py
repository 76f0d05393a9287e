"""What kvstrata tells the outside: events, metrics, explanations."""
