"""The data flow of each command, from a config to a run folder; a module for each."""
