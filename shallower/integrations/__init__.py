"""Where people train, and where their models come from; each of these needs a package of its own."""
