"""The `kvstrata` command."""
