"""Shipped for tests of kvstrata and of what plugs into it; nothing else imports this."""
